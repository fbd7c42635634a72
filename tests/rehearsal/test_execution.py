"""Strategies on fake tensors: what is counted, against sums that a small model allows to do by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.cli import main
from roll.config.roles import ModelArguments, OptimizerConfig, StrategyArguments, TrainingArguments, WorkerConfig
from roll.rehearsal.formulas import model_shape
from roll.rehearsal.roles import with_reshard_settled
from roll.rehearsal.simulate import Task, rehearse
from roll.rehearsal.stand_ins import fake_world
from roll.rehearsal.tracker import Collective, Kind, MemoryTraffic, Tracker
from roll.strategies.base import StateKind
from roll.strategies.training import adamw

HIDDEN, LAYERS, VOCABULARY, INTERMEDIATE, RANKS = 64, 2, 128, 96, 4
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}
MATRICES = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
WEIGHTS = VOCABULARY * HIDDEN + MATRICES + LAYERS * (3 * HIDDEN + 2 * HIDDEN) + HIDDEN
PROMPT, RESPONSE, ROWS = 8, 24, 4


def task_of(folder: Path, **changes: Any) -> Task:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    role = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(str(folder), dtype="bf16", disable_gradient_checkpointing=True),
        training_args=TrainingArguments(per_device_train_batch_size=1),
        strategy_args=StrategyArguments("fsdp2_train", {KEY: True}),
    )
    options = {"rows_per_update": ROWS, "updates": 2, "forward_rows": 2 * ROWS, "sends": True}
    return Task(role, RANKS, RANKS, PROMPT, RESPONSE, **(options | changes))


def test_a_tracker_counts_what_is_alive_and_what_was_at_the_peak() -> None:
    tracker = Tracker(granularity=512)
    with tracker:
        held = torch.empty(1024)  # 4096 bytes
        with tracker.counting() as tally:
            square = held.view(32, 32) @ held.view(32, 32)  # 4096 bytes more
            double = square + square
            del square
            double.add_(1.0)
        assert tracker.live[Kind.ACTIVATIONS] == 2 * 4096
        assert sum(tally.peak.values()) == 3 * 4096
        assert tally.flops == 2 * 32**3
        tracker.mark([held], Kind.PARAMETERS)
        assert tracker.live[Kind.PARAMETERS] == 4096
        double.untyped_storage().resize_(0)
        assert tracker.live[Kind.ACTIVATIONS] == 0
        double.untyped_storage().resize_(100)
        assert tracker.live[Kind.GATHERED] == 512
        assert float(held.sum()) == 1.0 and (torch.tensor([3]) + 1).item() == 4
    del held, double
    assert not any(tracker.live.values())


def bytes_moved(work: Callable[[torch.Tensor], object], cache: int = 0) -> int:
    """Of work on 1024 numbers of four bytes, which are in memory before."""
    tracker = Tracker(granularity=512, cache=cache)
    with tracker:
        given = torch.empty(32, 32)
        with tracker.counting() as tally:
            work(given)
    return sum(operation.num_bytes * count for operation, count in tally.operations.items())


@pytest.mark.parametrize(
    ("work", "tensors"),
    [
        (lambda x: x + x.t(), 3),
        (lambda x: x.add_(1.0), 2),
        (lambda x: x.copy_(x.t().contiguous()), 4),
        (lambda x: torch.add(x, x, out=x.new_empty(32, 32)), 3),
        (lambda x: torch.zeros_like(x), 1),
        (lambda x: x.zero_(), 1),
        (lambda x: torch.empty_like(x), 0),
        (lambda x: torch.ops.aten._unsafe_view(x, [1024]), 0),
        (lambda x: torch.ops.prim.device(x), 0),
        (lambda x: x.expand(8, 32, 32).sum(), 1),
    ],
)
def test_an_operation_moves_what_it_reads_and_writes(work: Callable[[torch.Tensor], object], tensors: int) -> None:
    assert abs(bytes_moved(work) - tensors * 4096) <= 4  # a sum is a number


def test_scattering_moves_index_and_source_and_a_part_of_the_target() -> None:
    index, source = torch.arange(8), torch.ones(8, 32)
    part = 8 * 32 * 4
    for scatter in (
        lambda x: x.index_add_(0, index, source),
        lambda x: x.index_copy_(0, index, source),
        lambda x: x.index_put_((index,), source),
    ):
        assert bytes_moved(scatter) == 8 * 8 + 3 * part


def test_a_cache_keeps_what_was_used_last() -> None:
    assert bytes_moved(lambda x: (x + 1.0, x + 1.0), cache=1 << 20) == 4096, "what is freed in time is never written"
    assert bytes_moved(lambda x: x + (x + 1.0), cache=1 << 20) == 4096, "what is in the cache is not read again"
    assert bytes_moved(lambda x: x + (x + 1.0), cache=4096) == 3 * 4096, "the sum takes the place of the input"
    assert bytes_moved(lambda x: (x + 1.0) + 1.0, cache=2048) == 3 * 4096, "half of each goes past it"
    traffic = MemoryTraffic(cache=100)
    assert traffic.move([], [(1, 60)]) == 0
    assert traffic.move([(2, 60)], []) == 60 + 20, "a part of what was written goes to memory"
    assert traffic.move([(1, 60)], []) == 20
    traffic.forget(1)
    assert traffic.move([(3, 100)], []) == 100


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_collectives_are_counted_with_their_ranks_and_bytes() -> None:
    tracker = Tracker(granularity=512)
    with fake_world(4):
        half = torch.distributed.new_group([0, 1])
        with tracker:
            torch.distributed.all_gather_into_tensor(torch.empty(4096), torch.empty(1024))
            torch.distributed.reduce_scatter_tensor(torch.empty(2048), torch.empty(4096), group=half)
            torch.distributed.all_reduce(torch.empty(8, dtype=torch.bfloat16))
    ranks = (0, 1, 2, 3)
    wanted = [("all_gather", ranks, 4 * 4096), ("reduce_scatter", (0, 1), 4 * 4096), ("all_reduce", ranks, 16)]
    assert tracker.tally.collectives == {Collective(*one): 1 for one in wanted}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return rehearse(task_of(tmp_path_factory.mktemp("model")))


def test_fsdp2_holds_a_quarter_of_float32_weights_gradients_and_moments(run: Any) -> None:
    """Rounded up to 512 bytes for each tensor."""
    tensors = 1 + LAYERS * (7 + 3 + 2) + 1
    parameters, optimizer = run.states[StateKind.MODEL_PARAMS], run.states[StateKind.OPTIMIZER_STATES]
    assert WEIGHTS <= parameters <= WEIGHTS + tensors * 512 + 512  # and rotary frequencies
    assert 2 * WEIGHTS <= optimizer <= 2 * WEIGHTS + 3 * tensors * 512
    assert WEIGHTS <= run.works["train"].peak[Kind.GRADIENTS] <= WEIGHTS + tensors * 512


def test_flops_are_two_for_each_weight_and_token_and_three_times_that_with_a_backward_pass(run: Any) -> None:
    tokens = PROMPT + RESPONSE - 1  # the last one predicts nothing
    head = 2 * VOCABULARY * HIDDEN * RESPONSE
    # Half of scores and half of sums: queries see what is before them. The kernel's backward pass has five products.
    attention = LAYERS * 2 * 2 * HIDDEN * tokens * tokens // 2
    forward = 2 * MATRICES * tokens + head + attention
    assert run.works["forward"].flops == 2 * ROWS * forward
    # The log-softmax of so few tokens is kept: the head is not computed again.
    train = 3 * (2 * MATRICES * tokens + head) + attention * 7 // 2
    assert run.works["train"].flops == 2 * ROWS * train
    assert run.works["train"].micro_batches == 2 * ROWS


def test_traffic_is_that_of_gathering_every_unit_for_each_pass(run: Any) -> None:
    """In bf16: gathered for the forward pass, layers again for the backward pass; gradients reduced in float32."""
    gathered = sum(c.num_bytes * n for c, n in run.works["train"].collectives.items() if c.name == "all_gather")
    reduced = sum(c.num_bytes * n for c, n in run.works["train"].collectives.items() if c.name == "reduce_scatter")
    passes = run.works["train"].micro_batches
    layers = WEIGHTS - VOCABULARY * HIDDEN - HIDDEN
    assert reduced == passes * 4 * WEIGHTS
    assert passes * 2 * (WEIGHTS + layers) <= gathered <= passes * 2 * 2 * WEIGHTS
    assert sum(c.num_bytes for c in run.works["send"].collectives) == 2 * WEIGHTS


def test_states_that_are_offloaded_are_in_host_memory(tmp_path: Path, run: Any) -> None:
    task = task_of(tmp_path, forward_rows=0, sends=False, rows_per_update=1, updates=1)
    strategy = StrategyArguments("fsdp2_train", {"offload_policy": True})
    offloaded = rehearse(replace(task, role=replace(task.role, strategy_args=strategy)))
    assert not any(offloaded.states.values())
    assert sum(run.states.values()) <= offloaded.host <= sum(run.states.values()) + WEIGHTS + 20000
    assert offloaded.works["train"].peak[Kind.ACTIVATIONS] > 0


@pytest.mark.long
def test_moments_in_host_memory_are_all_that_leaves_the_device(tmp_path: Path, run: Any) -> None:
    task = task_of(tmp_path, forward_rows=0, sends=False, rows_per_update=1, updates=1)
    strategy = StrategyArguments("fsdp2_train", {"optimizer_cpu_offload": True})
    on_host = rehearse(replace(task, role=replace(task.role, strategy_args=strategy)))
    moments = run.states[StateKind.OPTIMIZER_STATES]
    assert on_host.states == {**run.states, StateKind.OPTIMIZER_STATES: 0}
    assert 0.99 * moments <= on_host.host <= moments and on_host.works["train"].peak[Kind.OPTIMIZER] == 0


@pytest.mark.long
def test_moments_in_eight_bits_are_counted_with_their_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "MIN_8BIT_SIZE", 256)  # of this model's shards
    task = task_of(tmp_path, forward_rows=0, sends=False, rows_per_update=1, updates=1)
    training = replace(task.role.training_args, optimizer=OptimizerConfig("adamw_8bit"))
    run = rehearse(replace(task, role=replace(task.role, training_args=training)))
    quantised = (VOCABULARY * HIDDEN + MATRICES) // RANKS * 2 * (1 + 4 / 256)
    tensors = 1 + LAYERS * (7 + 3 + 2) + 1
    assert quantised < run.states[StateKind.OPTIMIZER_STATES] <= quantised + 5 * tensors * 512
    assert run.works["train"].peak[Kind.OPTIMIZER] == run.states[StateKind.OPTIMIZER_STATES]


def test_a_model_that_is_not_known_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "qwen2.5-7B-rlvr_fsdp2/rlvr_config", "pretrain=me/my-model"]) == 2
    assert "--model-config" in capsys.readouterr().err


KEY = "reshard_after_forward"


@pytest.mark.long_rows("True")
@pytest.mark.parametrize("freed", [True, False])
def test_what_stays_gathered_is_gathered_once_a_step(tmp_path: Path, freed: bool) -> None:
    """Two updates of four micro-batches, each with a forward and a backward pass."""
    task = task_of(tmp_path, forward_rows=0, sends=False)
    strategy = StrategyArguments("fsdp2_train", {KEY: freed})
    work = rehearse(replace(task, role=replace(task.role, strategy_args=strategy))).works["train"]
    gathers = sum(times for one, times in work.collectives.items() if one.name == "all_gather")
    assert gathers == 2 * (LAYERS + 1) * (2 * ROWS if freed else 1)


@pytest.mark.parametrize(("memory", "frees"), [(19, True), (20, False)])
def test_what_stays_gathered_is_chosen_by_the_memory_of_the_rehearsed_device(
    tmp_path: Path, memory: int, frees: bool
) -> None:
    role = replace(task_of(tmp_path).role, strategy_args=StrategyArguments("fsdp2_train", {KEY: "auto"}))
    shape = model_shape(CONFIG)
    assert shape is not None
    found = with_reshard_settled(role, shape, memory * shape.total).strategy_args.strategy_config
    assert found == {KEY: frees}
