"""Live and stored tensors of every mixture-of-experts family are views of each other, as transformers has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.models.loading import TensorFiles
from roll.models.stored import StoredLayout
from tests.strategies.moe_models import FAMILIES, SEPARATE, moe_config


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != SEPARATE])
def test_there_and_back(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(moe_config(family))
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(tmp_path / "stored")
    wanted, live = load_file(tmp_path / "stored" / "model.safetensors"), dict(model.state_dict())
    layout = StoredLayout(model)
    views = layout.views(live)
    assert views.keys() == wanted.keys()
    assert all(torch.equal(views[name], tensor) for name, tensor in wanted.items())
    assert {name: tuple(shape) for name, shape in layout.stored_shapes().items()} == {
        name: tuple(tensor.shape) for name, tensor in wanted.items()
    }
    joined = layout.joined(wanted)
    assert joined.keys() == live.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in live.items())
    # What is written into a stored tensor is what the model computes with.
    name = next(name for name in views if "experts" in name and "shared" not in name)
    views[name].zero_()
    assert (live[layout.live_name(name)] == 0).sum() >= views[name].numel()
    # On their way, experts are matrices in every family.
    way = layout.on_the_way()
    travelling = way.views(live)
    assert all(tensor.ndim < 3 for name, tensor in travelling.items() if "experts" in name)
    assert travelling.keys() == wanted.keys() or family == "gpt_oss"
    again = way.joined(travelling)
    assert again.keys() == live.keys() and all(torch.equal(again[name], tensor) for name, tensor in live.items())
    # A folder may hold live tensors as well.
    (tmp_path / "live").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in joined.items()}, tmp_path / "live" / "model.safetensors")
    for folder in ("stored", "live"):
        files = TensorFiles(str(tmp_path / folder))
        assert all(torch.equal(layout.read(files, name), tensor) for name, tensor in wanted.items())
