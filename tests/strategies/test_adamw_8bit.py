"""AdamW with moments in 8 bits: codes, their error in training, and checkpoints, which are AdamW's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from roll.checkpoint.tensors import MOMENTS
from roll.config.roles import EIGHT_BIT_BLOCK, OptimizerConfig, WorkerConfig
from roll.rehearsal.formulas import moment_bytes
from roll.strategies.training import adamw
from roll.strategies.training.adamw import SMALLEST_SCALE, AdamW8bit, EightBits, table
from roll.strategies.training.optimizer import state_tensors
from tests.strategies import jobs
from tests.strategies.comparison import assert_resumed, assert_same_bits, contents_of
from tests.strategies.samples import TensorBatch, make_role
from tests.strategies.test_checkpoint import LAYOUTS, SCHEDULE
from tests.strategies.test_muon import load_and_save
from tests.strategies.test_offload import train_in_place, train_with_moves

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EIGHT_BIT = SCHEDULE | {"optimizer": OptimizerConfig("adamw_8bit")}


def test_the_tables_are_those_of_the_paper():
    """Code 0 1 0 1 1 0 0 0 is 10^-1 times .1 + .9 * 24.5 / 32: one zero after the sign, then 11000."""
    signed, unsigned = table(True), table(False)
    assert len(signed) == 255 and len(unsigned) == 256
    assert signed == sorted({-number for number in signed}) and unsigned == sorted(set(unsigned))
    assert {-1.0, 0.0, 1.0} < set(signed) and unsigned[0] == 0.0 and unsigned[-1] == 1.0
    assert 0.1 * (0.1 + 0.9 * 24.5 / 32) in signed and 0.1 * (0.1 + 0.9 * 48.5 / 64) in unsigned
    assert [number for number in signed if 0 < number < 1e-5] == pytest.approx([5.5e-7, 3.25e-6, 7.75e-6])


def values_of_all_sizes(signed: bool, blocks: int = 60) -> torch.Tensor:
    """Blocks of normal and of uniform numbers of many magnitudes and sizes, denormal ones and zeros among them."""
    torch.manual_seed(0)
    magnitudes = 10.0 ** torch.empty(blocks, EIGHT_BIT_BLOCK).uniform_(-9, 0)
    values = torch.where(torch.rand(blocks, 1) < 0.5, torch.randn(blocks, EIGHT_BIT_BLOCK), magnitudes)
    values *= torch.rand(blocks, EIGHT_BIT_BLOCK) < 0.9
    values *= 2.0 ** torch.linspace(-148, 120, blocks)[:, None]
    values[7] = 0.0
    return values if signed else values.abs()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_nearest_numbers(device, signed):
    """Compared with a search through the whole table in float64. What has no sign and is positive is not 0."""
    values = values_of_all_sizes(signed).double()
    numbers = torch.tensor(table(signed), dtype=torch.float64)
    scales = values.abs().amax(1, keepdim=True).clamp(min=SMALLEST_SCALE)
    distances = (values / scales).unsqueeze(-1) - numbers
    if not signed:
        distances[..., 0].masked_fill_(values > 0, torch.inf)
    codes, own_scales = EightBits(signed, torch.device(device)).encode(values.float().to(device))
    found = distances.abs().gather(-1, codes.view(values.shape).long().cpu().unsqueeze(-1)).squeeze(-1)
    # Bounds and quotients are rounded to float32: a value may be so much nearer to the other number.
    assert (found <= distances.abs().amin(-1) + 2.0**-23).all()
    assert torch.equal(own_scales.cpu(), scales.flatten().float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("signed", [True, False])
def test_decoded_numbers_have_the_same_codes_and_scales(device, signed):
    """Of values, and of any codes of which each block has one of its largest number; also a cut last block."""
    eight_bits, largest = EightBits(signed, torch.device(device)), len(table(signed)) - 1
    any_codes = torch.randint(0, largest + 1, (300, EIGHT_BIT_BLOCK), dtype=torch.uint8, device=device)
    any_codes[::2, 5], any_codes[1::2, 5] = largest, 0 if signed else largest
    any_scales = 2.0 ** torch.linspace(-100, 127, 300, device=device)
    values = values_of_all_sizes(signed).to(device).flatten()
    encoded = [eight_bits.encode(part) for part in (values, values[:-100])]
    for codes, scales in ((any_codes.flatten(), any_scales), *encoded):
        decoded = eight_bits.decode(codes, scales, like=torch.empty(len(codes), device=device))
        again = eight_bits.encode(decoded)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


def relative_error(signed: bool, low: float) -> float:
    """The most by which rounding changes a number of at least ``low`` times its block's largest."""
    numbers = table(signed)
    pairs = [(one, other) for one, other in pairwise(numbers) if other > low]
    return max((other - one) / 2 / max(low, one) for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of the masters, and of the moments in a step
@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_as_close_to_adamw_as_the_tables_numbers_are_to_each_other(device, dtype):
    """Gradients of a constant sign between .8 and 1 keep first moments above .7 of their block's largest and second
    ones above .5, where rounding changes them by at most r1 and r2 of themselves. A moment is a mean, with positive
    weights, of the one before and of the gradient (its square), so its own relative error does not grow in the kernel:
    in step t it is at most (1 + r)^(t - 1) - 1, and that of an update m / sqrt(v) follows. ``dtype`` rounds each moment
    twice in the one optimizer and once in the other, and each weight once."""
    torch.manual_seed(0)
    rounding = torch.finfo(dtype).eps
    signs = torch.randn(64, EIGHT_BIT_BLOCK, device=device).sign().to(dtype)
    first, second = relative_error(True, 0.7), relative_error(False, 0.5)
    assert 0.01 < first < 0.016 and 0.003 < second < 0.008
    first, second = first + 2 * rounding, second + 2 * rounding
    weights = [torch.nn.Parameter(torch.zeros_like(signs)) for _ in range(2)]
    optimizers = [
        cls([own], lr=1.0, eps=1e-12, weight_decay=0.0, fused=True)
        for cls, own in zip((AdamW8bit, torch.optim.AdamW), weights, strict=True)
    ]
    bound = torch.zeros_like(weights[1], dtype=torch.float32)
    for step in range(6):
        gradient = signs * torch.empty_like(signs).uniform_(0.8, 1.0)
        before = weights[1].detach().clone().float()
        for own, one in zip(weights, optimizers, strict=True):
            own.grad = gradient.clone()
            one.step()
        after = weights[1].detach().float()
        bound += (after - before).abs() * ((1 + first) ** step * (1 - second) ** (-step / 2) - 1)
        bound += 1e-6 + rounding * (after.abs() + bound)
    difference = (weights[0].float() - weights[1].float()).detach().abs()
    assert (difference <= bound).all() and difference.max() > 0.01


def test_moments_take_two_bytes_a_weight_and_small_ones_stay_as_they_are():
    weights = [
        torch.nn.Parameter(torch.ones(shape)) for shape in ((64, 4 * EIGHT_BIT_BLOCK), (adamw.MIN_8BIT_SIZE - 1,))
    ]
    adam = AdamW8bit(weights, lr=1e-3, fused=True)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    adam.step()
    large, small = (list(adam.state[weight].values()) for weight in weights)
    bytes_of_step = 4
    wanted = 64 * 4 * EIGHT_BIT_BLOCK * moment_bytes(make_role(Path(), training=EIGHT_BIT))
    assert sum(one.nbytes for one in large) - bytes_of_step == wanted
    assert all(one.dtype is torch.float32 for one in small) and len(state_tensors(adam)) == 5 + 3
    storages = [one.data_ptr() for one in state_tensors(adam)]
    adam.step()
    assert [one.data_ptr() for one in state_tensors(adam)] == storages, "held where they were, for those who move them"


def quantised(role: WorkerConfig, *args: Any) -> Any:
    """The job of the last argument, with moments of these tiny models in 8 bits too."""
    *others, job = args
    with mock.patch.object(adamw, "MIN_8BIT_SIZE", 200):
        return job(role, *others)


def run_in(run: Any, job: Callable[..., Any], layout: str, *args: Any, **options: Any) -> Any:
    world, strategy, config = LAYOUTS[layout]
    options = {"training": EIGHT_BIT, "config": config} | options
    return run(quantised, world, strategy, "qwen2" if strategy == "megatron" else "tied", *args, job, **options)


RESUMED = [
    *((layout, "fp32") for layout in ("fsdp2-1", "fsdp2", "fsdp2-hsdp", "fsdp-1", "fsdp", "tp2", "dp2")),
    *((layout, "fp32") for layout in ("pp2-vpp2-dp2",)),
    *((layout, "bf16") for layout in ("fsdp2", "fsdp", "dp2")),
    ("fsdp2", "fp16"),
]


@pytest.mark.long_rows("fsdp-bf16", "dp2-bf16")
@pytest.mark.default_rows("fsdp2-fp32", "fsdp-bf16", "dp2-bf16")
@pytest.mark.parametrize(("layout", "dtype"), RESUMED)
def test_resumed_equals_uninterrupted_bit_for_bit(run, tmp_path, layout, dtype):
    whole = run_in(run, jobs.train_and_save, layout, tmp_path, dtype=dtype)
    resumed = run_in(run, jobs.load_and_train, layout, tmp_path, dtype=dtype)
    assert_resumed(whole, resumed, tmp_path)
    run_in(run, jobs.train_and_save, layout, tmp_path / "plain", dtype=dtype, training=SCHEDULE)
    written, plain = contents_of(tmp_path), contents_of(tmp_path / "plain")
    assert written.keys() == plain.keys()
    assert any(not torch.equal(written[name], plain[name]) for name in written if name.startswith(MOMENTS[0]))


@pytest.mark.long
def test_masters_in_bf16_resume_bit_for_bit_too(run, tmp_path):
    """Their moments are decoded to bf16, which rounds by less than half the distance of two codes."""
    options = {"dtype": "bf16", "config": {"master_dtype": "bf16"}}
    whole = run_in(run, jobs.train_and_save, "fsdp2", tmp_path, **options)
    assert_resumed(whole, run_in(run, jobs.load_and_train, "fsdp2", tmp_path, **options), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_moved_states_change_nothing(run, strategy):
    ways = (train_with_moves, train_in_place)
    results = [run(quantised, 2, strategy, "tied", way, training=EIGHT_BIT) for way in ways]
    for moved, in_place in zip(*results, strict=True):
        assert moved["held"] == 0
        assert_same_bits(moved["weights"], in_place["weights"])


def load_save(role: WorkerConfig, batch: TensorBatch, *paths: Path) -> None:
    load_and_save(role, *paths)


@pytest.mark.long
@pytest.mark.default_rows("fsdp2-zero2")
@pytest.mark.parametrize(("layout", "plain"), [("fsdp2", "zero2"), ("fsdp", "fsdp2-1"), ("tp2", "dp2")])
def test_checkpoints_go_to_adamw_and_back(run, tmp_path, layout, plain):
    """AdamW's moments are rounded to numbers that AdamW, under any strategy, then has to the bit; read again they have
    the same codes."""
    run_in(run, jobs.train_and_save, plain, tmp_path / "plain", training=SCHEDULE)
    hops = [(layout, EIGHT_BIT), (plain, SCHEDULE), (layout, EIGHT_BIT)]
    for number, (reader, training) in enumerate(hops):
        source = tmp_path / (str(number) if number else "plain")
        run_in(run, load_save, reader, source, tmp_path / str(number + 1), training=training)
    begun, rounded = contents_of(tmp_path / "plain"), contents_of(tmp_path / "1")
    assert_same_bits(contents_of(tmp_path / "2"), rounded)
    assert_same_bits(contents_of(tmp_path / "3"), rounded)
    assert rounded.keys() == begun.keys()
    for name, tensor in begun.items():
        is_moment = name.startswith(MOMENTS)
        # A part of a tensor may be smaller than the smallest that is rounded.
        close = {"rtol": 0.0, "atol": float(tensor.abs().max()) / 64} if is_moment else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(rounded[name], tensor, **close)
    assert any(not torch.equal(rounded[name], tensor) for name, tensor in begun.items())
