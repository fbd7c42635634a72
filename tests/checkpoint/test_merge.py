"""``roll merge``: each method against the plain formula of its paper, tensor by tensor; and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll.checkpoint.merge import Recipe, main
from roll.config.reading.errors import ConfigError

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base, and two models not far from it."""
    folder = tmp_path_factory.mktemp("models")
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(config)
    made = []
    for number in range(3):
        if number:
            with torch.no_grad():
                for parameter in base.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
        made.append(folder / f"model{number}")
        base.save_pretrained(made[-1])
        (made[-1] / "tokenizer_config.json").write_text("{}")
    return made


def read(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def mean(a: Tensor, b: Tensor) -> Tensor:
    return (a + 3 * b) / 4


def slerp(a: Tensor, b: Tensor, t: float = 0.3) -> Tensor:
    """On the great circle between the directions; what is nearly parallel is mixed (0.9995, as the library has it)."""
    cosine = float((a / a.norm() * (b / b.norm())).sum())
    if abs(cosine) > 0.9995:
        return (1 - t) * a + t * b
    angle = math.acos(cosine)
    return (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)


def ties(base: Tensor, a: Tensor, b: Tensor, density: float = 0.5) -> Tensor:
    """Trim, elect the sign, mean of those that agree: arXiv 2306.01708, algorithm 1, element by element."""
    trimmed = []
    for other in (a, b):
        difference = (other - base).flatten()
        kept = int(density * difference.numel())
        order = difference.abs().argsort(descending=True)
        cut = torch.zeros_like(difference)
        cut[order[:kept]] = difference[order[:kept]]
        trimmed.append(cut)
    out = torch.zeros_like(trimmed[0])
    for place, pair in enumerate(zip(*(one.tolist() for one in trimmed), strict=True)):
        sign = math.copysign(1.0, sum(pair))
        agreeing = [value for value in pair if value * sign > 0]
        out[place] = sum(agreeing) / len(agreeing) if agreeing else 0.0
    return base + out.view_as(base)


def agreeing(base: Tensor, *differences: Tensor) -> Tensor:
    """The sum of the differences whose sign is that of the sum of all, element by element."""
    out = torch.zeros_like(base).flatten()
    for place, values in enumerate(zip(*(one.flatten().tolist() for one in differences), strict=True)):
        sign = math.copysign(1.0, sum(values))
        out[place] = sum(value for value in values if value * sign > 0)
    return base + out.view_as(base)


@pytest.mark.long
@pytest.mark.parametrize("method", ["linear", "slerp", "ties", "dare_linear", "dare_ties"])
def test_a_merge_is_its_papers_formula(models: list[Path], method: str, tmp_path: Path) -> None:
    pytest.importorskip("mergekit", reason="needs mergekit: the extra [merge]")
    base, a, b = models
    words = {
        "linear": ["--weights", "1", "3"],
        "slerp": ["--t", "0.3"],
        "ties": ["--base", str(base), "--density", "0.5"],
        "dare_linear": ["--base", str(base), "--density", "1", "--weights", "0.5", "2"],
        "dare_ties": ["--base", str(base), "--density", "1", "--weights", "0.5", "0.75"],
    }
    status = main(
        [str(a), str(b), "--method", method, "--dtype", "fp32", "--output", str(tmp_path / "m"), *words[method]]
    )
    assert status == 0
    merged, start, first, second = map(read, (tmp_path / "m", base, a, b))
    assert merged.keys() == first.keys()
    for name, tensor in merged.items():
        x, y, zero = first[name], second[name], start[name]
        wanted = {
            "linear": lambda x=x, y=y: mean(x, y),
            "slerp": lambda x=x, y=y: slerp(x, y),
            "ties": lambda x=x, y=y, zero=zero: ties(zero, x, y),
            "dare_linear": lambda x=x, y=y, zero=zero: zero + 0.5 * (x - zero) + 2 * (y - zero),
            "dare_ties": lambda x=x, y=y, zero=zero: agreeing(zero, 0.5 * (x - zero), 0.75 * (y - zero)),
        }[method]()
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-6, msg=f"{method} {name}")
    about = json.loads((tmp_path / "m/merge.json").read_text())
    assert about["method"] == method and about["models"] == [str(a), str(b)]


@pytest.mark.long
@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_what_dare_draws(models: list[Path], method: str, tmp_path: Path) -> None:
    """A second source that is the base itself: what comes out is the drawn part of the first one's difference."""
    pytest.importorskip("mergekit", reason="needs mergekit: the extra [merge]")
    base, _, b = models
    words = [str(b), str(base), "--base", str(base), "--method", method, "--density", "0.25", "--dtype", "fp32"]
    merged = {}
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        assert main([*words, "--seed", str(seed), "--output", str(tmp_path / name)]) == 0
        merged[name] = read(tmp_path / name)
    start, end = read(base), read(b)
    kept = {}
    for name, tensor in merged["one"].items():
        assert torch.equal(tensor, merged["again"][name]), "the draw is the seed's"
        whole, part = (end[name] - start[name]).double(), (tensor - start[name]).double()
        drawn = part.abs() > 0.5 * whole.abs()
        assert torch.equal(tensor[~drawn], start[name][~drawn])
        if drawn.any():  # a tensor's L1 norm is kept, where the paper divides by the density
            scaled = whole * (whole.abs().sum() / whole[drawn].abs().sum())
            torch.testing.assert_close(part[drawn], scaled[drawn], rtol=1e-3, atol=1e-6, msg=name)
        kept[name] = drawn
    every = torch.cat([one.flatten() for one in kept.values()]).double()
    assert abs(float(every.mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(every))
    assert any(not torch.equal(tensor, merged["other"][name]) for name, tensor in merged["one"].items())


def test_mistakes(models: list[Path], tmp_path: Path) -> None:
    a, b = map(str, models[:2])
    out = ["--output", str(tmp_path / "new")]
    for words, message in (
        ([a, *out], "name two models or more"),
        ([a, b, b, "--method", "slerp", *out], "name two"),
        ([a, b, "--method", "ties", *out], "merges differences to one model"),
        ([a, b, "--base", a, *out], "linear has none"),
        ([a, b, "--weights", "1", *out], "one for each of the 2 models"),
        ([a, b, "--weights", "1", "-1", *out], "their sum must be positive"),
        ([a, b, "--method", "dare_ties", "--base", a, "--density", "2", *out], "between 0 and 1"),
        ([a, str(tmp_path / "nothing"), *out], "no such folder"),
        ([a, b, "--output", str(tmp_path)], "exists"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(words)
    assert not (tmp_path / "new").exists()


def test_other_shapes_are_refused(models: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(models[1], other)
    config = Qwen2Config.from_pretrained(other)
    config.intermediate_size = 32
    Qwen2ForCausalLM(config).save_pretrained(other)
    with pytest.raises(ConfigError, match=r"must have the tensors of .*mlp.*\(16, 32\) and \(16, 24\)"):
        main([str(models[0]), str(other), "--output", str(tmp_path / "new")])


def test_what_mergekit_is_asked() -> None:
    """Ratios for the mean and TIES, values for DARE, whose base is named; SLERP's is the first."""
    recipe = Recipe("dare_ties", (Path("a"), Path("b")), Path("base"), (1.0, 3.0), 0.3, 0.5, torch.bfloat16, 0)
    asked = recipe.as_mergekit()
    assert asked["base_model"] == "base" and asked["dtype"] == "bfloat16" and not asked["parameters"]["normalize"]
    assert [one["parameters"] for one in asked["models"]] == [
        {"weight": 1.0, "density": 0.3},
        {"weight": 3.0, "density": 0.3},
    ]
