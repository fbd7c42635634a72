"""Products and their gradients against float64 arithmetic, on both sides of the size where the kernel changes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from roll.distributed.nodes import WORKER_DEFAULTS
from roll.models.kernels import MIN_WORK, linear, use_products


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 192), (257, 192), (2, 40, 192)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_values(shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    weight = (_random(320, 192, seed=0) / 192**0.5).to(dtype)
    bias = _random(320, seed=1).to(dtype) if with_bias else None
    x = _random(*shape[:-1], 200, seed=2).to(dtype)[..., 8:]  # not contiguous
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(linear(x, weight, bias).double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rows", [4, 400])
@pytest.mark.parametrize("learns", [(True, True, True), (True, False, False), (False, True, False)])
def test_gradients(rows: int, learns: tuple[bool, bool, bool]) -> None:
    x, weight, bias = _random(2, rows, 96, seed=0), _random(160, 96, seed=1) / 96**0.5, _random(160, seed=2)
    upstream = _random(2, 160, rows, seed=3).transpose(1, 2)  # not contiguous
    assert (x.numel() * 160 > MIN_WORK) == (rows > 4), "one of the sizes is on each side"
    gradients = []
    for dtype in (torch.float32, torch.float64):
        inputs = [
            part.to(dtype, copy=True).requires_grad_(learn)
            for part, learn in zip((x, weight, bias), learns, strict=True)
        ]
        product = linear if dtype == torch.float32 else nn.functional.linear
        product(*inputs).backward(upstream.to(dtype))
        gradients.append([None if part.grad is None else part.grad.double() for part in inputs])
    for found, expected, learn in zip(*gradients, learns, strict=True):
        assert (found is not None) == (expected is not None) == learn
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_a_model_keeps_its_function_and_names() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64, bias=False))
    x, names = _random(128, 64, seed=0), list(model.state_dict())
    before = model(x)
    before.square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    use_products(model)
    after = model(x)
    after.square().sum().backward()
    torch.testing.assert_close(after, before)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
    assert list(model.state_dict()) == names


MANY_SHAPES = """
import random
from pathlib import Path
import torch
from roll.models.kernels import onednn_product

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.set_num_threads(1)
random.seed(0)
weights = [torch.randn(width, 64) for width in (64, 192, 512)]
for number in range(150):
    rows = torch.randn(random.randrange(2000, 9000), 64)
    for weight in weights:
        onednn_product(rows, weight)
    if number == 10:
        begin = held()
print(held() - begin)
"""


@pytest.mark.matrix
def test_workers_keep_little_for_shapes_that_do_not_come_again() -> None:
    grown = []
    for variables in ({}, WORKER_DEFAULTS):
        environ = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
        command = [sys.executable, "-c", MANY_SHAPES]
        run = subprocess.run(command, env=environ | variables, capture_output=True, text=True, check=True)
        grown.append(int(run.stdout))
    assert grown[1] < 0.6 * grown[0], "the caches of oneDNN are as large as without the defaults"
