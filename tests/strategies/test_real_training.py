"""Training SmolLM2-135M-Instruct: every strategy computes what plain transformers and torch compute.

What rounding explains is measured: no strategy may be twice as far from the steps in float64 as plain transformers is
in the dtype of the strategy.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.roles import WorkerConfig
from roll.strategies.base import Output
from tests.strategies import jobs, lora_cases
from tests.strategies.comparison import by_replica
from tests.strategies.greedy_answers import chat_prompts, token_ids
from tests.strategies.samples import TensorBatch, batch_of, plain_adamw, plain_model, plain_outputs, policy_loss

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
RATE, EPSILON, UPDATES = 1e-4, 1e-3, 3
SCALE = 0.004
"""Largest deviation of a gradient's scale from 1."""
RESPONSES = [
    "The sea is wide and blue, and those who sail on it for years say it never looks the same twice.<|im_end|>",
    "First we add 12 and 30, which makes 42. Then nothing is left, so the final answer is #### 42<|im_end|>",
]
PACKED, SHARED = {"use_sequence_packing": True}, {"use_prefix_sharing": True}
TP3 = {"config": {"tp": 3}}  # of nine heads, and three of keys and values
CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "fsdp2-packed": (1, "fsdp2", "whole", PACKED),
    "fsdp2-shared-prompts": (1, "fsdp2", "whole", SHARED),
    "fsdp": (2, "fsdp", "whole", {}),
    "zero3": (2, "zero3", "whole", {}),
    "megatron-tp3": (3, "megatron", "whole", TP3),
    "fsdp2-lora": (2, "fsdp2", "lora", {}),
    "fsdp2-bf16": (1, "fsdp2", "bf16", {"dtype": "bf16"}),
}
"""Ranks, strategy, what is trained, and options of the role by case."""
Figures = dict[str, Any]


@pytest.fixture(scope="module")
def batch(smollm2: Path) -> TensorBatch:
    """Two answers to each of two prompts."""
    return batch_of(chat_prompts(smollm2, 2), token_ids(smollm2, *RESPONSES))


@pytest.fixture(scope="module")
def adapter(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora_cases.write_adapter(smollm2, tmp_path_factory.mktemp("adapter"), std=0.03)


def plain_training(folder: Path, adapter: Path | None, batch: TensorBatch, dtype: torch.dtype) -> Figures:
    """Steps of torch's AdamW with a model of ``dtype``, and weights of at least float32: log-probs and gradients of the
    first step, merged weights after the last, and how far these have moved."""
    masters = lora_cases.plain_peft_model(folder, adapter) if adapter else plain_model(folder)
    model = plain_model(folder, dtype) if dtype == torch.bfloat16 else masters.to(dtype)
    trained = {name.removeprefix("base_model.model."): p for name, p in masters.named_parameters() if p.requires_grad}
    optimizer = plain_adamw(trained.values(), lr=RATE, eps=EPSILON)
    figures: Figures = {}
    for _ in range(UPDATES):
        model.zero_grad()
        outputs = plain_outputs(model, batch)
        policy_loss(outputs, batch)[0].backward()
        if model is not masters:
            for parameter, own in zip(masters.parameters(), model.parameters(), strict=True):
                parameter.grad = own.grad.float()
        if not figures:
            gradients = {name: parameter.grad.float().clone() for name, parameter in trained.items()}
            figures = {"log_probs": outputs["log_probs"].detach().float(), "gradients": gradients}
        optimizer.step()
        if model is not masters:
            model.load_state_dict(masters.state_dict())
    del optimizer  # in float64 its moments take 2 GB
    masters.zero_grad()
    whole, start = masters, plain_model(folder)
    if adapter:
        whole, start = masters.merge_and_unload(), lora_cases.plain_peft_model(folder, adapter).merge_and_unload()
    weights = {name: parameter.detach().float() for name, parameter in whole.named_parameters()}
    moved = {name: float((weights[name] - parameter.detach()).norm()) for name, parameter in start.named_parameters()}
    return figures | {"weights": weights, "moved": {name: norm for name, norm in moved.items() if norm}}


def distances_of_gradients(found: dict[str, torch.Tensor], reference: Figures) -> dict[str, float]:
    """By parameter, relative to the norm of its gradient."""
    wanted = reference["gradients"]
    assert found.keys() == wanted.keys()
    return {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}


def scale_of_gradients(found: dict[str, torch.Tensor], reference: Figures) -> float:
    """The factor by which the reference's gradients, taken as one vector, come closest to those that were found."""
    wanted = reference["gradients"]
    products = sum(float((found[name] * wanted[name]).double().sum()) for name in wanted)
    return products / sum(float(wanted[name].double().square().sum()) for name in wanted)


def distances_of_weights(found: Iterable[tuple[str, torch.Tensor]], reference: Figures) -> dict[str, float]:
    """By parameter that is trained, relative to how far it moved."""
    moved, wanted = reference["moved"], reference["weights"]
    return {name: float((weight - wanted[name]).norm() / moved[name]) for name, weight in found if name in moved}


def plain_distances(folder: Path, adapter: Path | None, batch: TensorBatch, dtype: torch.dtype, file: Path) -> Figures:
    """How far plain transformers in ``dtype`` is from the steps in float64, which are written to ``file``."""
    if not file.exists():
        torch.save(plain_training(folder, adapter, batch, torch.float64), file)
    wanted = torch.load(file, mmap=True)
    found = plain_training(folder, adapter, batch, dtype)
    return {
        "log_probs": float((found["log_probs"] - wanted["log_probs"]).abs().max()),
        "scale": scale_of_gradients(found["gradients"], wanted),
        "gradients": distances_of_gradients(found["gradients"], wanted),
        "weights": distances_of_weights(found["weights"].items(), wanted),
    }


@pytest.fixture(scope="module")
def reference(
    smollm2: Path, adapter: Path, batch: TensorBatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], tuple[Path, Figures]]]:
    """``reference(trained)``: the file of the steps in float64, and the distances of plain transformers from them."""
    root = tmp_path_factory.mktemp("references")
    measured: dict[str, Figures] = {}

    def of(trained: str) -> tuple[Path, Figures]:
        own = adapter if trained == "lora" else None
        file = root / ("lora" if own else "whole")
        if trained not in measured:
            dtype = torch.bfloat16 if trained == "bf16" else torch.float32
            # In a process of its own, which gives the memory back.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                measured[trained] = process.submit(plain_distances, smollm2, own, batch, dtype, file).result()
        return file, measured[trained]

    yield of
    shutil.rmtree(root)


def distances(role: WorkerConfig, batch: TensorBatch, file: Path) -> Figures:
    """In one rank: the steps under the role's strategy, and how far they are from those in float64."""
    wanted = torch.load(file, mmap=True)
    strategy = jobs.trainer(role)
    found: Figures = {"rank_info": strategy.rank_info}
    found["log_probs"] = strategy.forward(batch, jobs.POLICY)[Output.LOG_PROBS]
    strategy.train_step(batch, policy_loss, jobs.POLICY)
    gradients = lora_cases.under_live_names(strategy) if role.model_args.adapter_name_or_path else strategy.gradients
    if strategy.rank_info.rank == 0:
        found["gradients"] = distances_of_gradients(gradients, wanted)
        found["scale"] = scale_of_gradients(gradients, wanted)
    del gradients, strategy.gradients, strategy.optimizer_step  # only the first step's are compared
    for _ in range(UPDATES - 1):
        strategy.train_step(batch, policy_loss, jobs.POLICY)
    buckets = strategy.named_full_weights(2**27)
    found["weights"] = distances_of_weights((pair for bucket in buckets for pair in bucket), wanted)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain_transformers(rank_pool, run, smollm2, adapter, batch, reference, case):
    """No parameter is twice as far from float64 as the farthest of plain transformers is.

    A gradient that is 1% too large exceeds the distance in float32, and the scale in every dtype.
    """
    world, strategy, trained, options = CASES[case]
    file, plain = reference(trained)
    rank_pool.restart()  # or the ranks would keep what the strategies before took: 18 GB in the end
    options = {"micro_batch": 4, "infer_batch_size": 4, "split": (2, 2) if world == 2 else (4,)} | options
    if trained == "lora":
        options["model_args"] = {"adapter_name_or_path": str(adapter)}
    training = {"learning_rate": RATE, "adam_epsilon": EPSILON}
    results = run(distances, world, strategy, smollm2, file, batch=batch, training=training, **options)
    log_probs = torch.cat([result["log_probs"] for result in by_replica(results)])
    wanted = torch.load(file, mmap=True)["log_probs"]
    found = results[0] | {"log_probs": float((log_probs - wanted).abs().max())}
    assert found["log_probs"] <= 2 * plain["log_probs"]
    assert abs(found["scale"] - 1) < SCALE, plain["scale"]
    assert trained == "bf16" or 2 * max(plain["gradients"].values()) < 0.01
    # Weights that leave a bf16 role are rounded to bf16: by more than they have moved.
    for kind in ("gradients",) if trained == "bf16" else ("gradients", "weights"):
        distance, name = max((value, name) for name, value in found[kind].items())
        assert found[kind].keys() == plain[kind].keys()
        assert distance <= 2 * max(plain[kind].values()), f"{kind}: {name}"
