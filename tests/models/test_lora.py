"""Adapters go into a model where they were asked for, and a target that is not there is named with those that are."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from roll.config.installation import install_command
from roll.config.roles import ModelArguments
from roll.models.build import build_model
from roll.models.lora import Adapters, adapter_names, add_adapters, merged_rows, merged_weight
from roll.models.lora_targets import EXPERT_TENSORS
from tests.strategies.lora_cases import write_adapter
from tests.strategies.moe_models import write_moe
from tests.strategies.samples import make_batch, plain_model, plain_outputs, write_model


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("untied"), tied=False)


def adapted(folder: Path, dtype: torch.dtype = torch.float32, head: Any = "causal_lm", **options: Any) -> Any:
    args = ModelArguments(model_name_or_path=str(folder), **options)
    model = build_model(args, head, dtype)
    return model, add_adapters(model, args, seed=3, dtype=torch.float32)


def targets(model: Any) -> set[str]:
    return {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}


@pytest.mark.parametrize(
    ("target", "ends"),
    [
        ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("q_proj,mlp.down_proj", {"q_proj", "down_proj"}),
        (["v_proj"], {"v_proj"}),
        (r"model\.layers\.\d+\.self_attn\.(q|k)_proj", {"q_proj", "k_proj"}),
    ],
)
@pytest.mark.parametrize("head", ["causal_lm", "value"])
def test_targets(untied: Path, target: Any, ends: set[str], head: str) -> None:
    model, _ = adapted(untied, head=head, lora_target=target)
    found = targets(model)
    assert {name.rpartition(".")[2] for name in found} == ends
    assert len(found) == 2 * len(ends), "in both layers"


def test_only_adapters_are_trained_and_in_float32(tied: Path) -> None:
    model, _ = adapted(tied, torch.bfloat16, lora_target="all-linear", lora_rank=4)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert parameter.dtype is (torch.float32 if "lora_" in name else torch.bfloat16), name
    rank, scale = model.get_submodule("model.layers.0.mlp.up_proj").lora_A.default.weight.shape[0], 2.0
    assert rank == 4
    assert model.get_submodule("model.layers.0.mlp.up_proj").scaling["default"] == scale, "alpha is twice the rank"


def test_a_new_adapter_changes_nothing_and_its_seed_decides(tied: Path) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    model, _ = adapted(tied, lora_target="q_proj")
    torch.manual_seed(12)
    again, _ = adapted(tied, lora_target="q_proj")
    first, second = dict(model.named_parameters()), dict(again.named_parameters())
    assert all(torch.equal(first[name], second[name]) for name in first)
    batch = make_batch()
    with torch.no_grad():
        wanted, actual = plain_outputs(plain_model(tied), batch), plain_outputs(model, batch)
    assert torch.equal(actual["log_probs"], wanted["log_probs"])
    torch.manual_seed(11)
    assert torch.equal(before, torch.get_rng_state())


def test_disabled_adapters_leave_the_base_and_what_is_trained(untied: Path, tmp_path: Path) -> None:
    adapter = write_adapter(untied, tmp_path, whole=["lm_head"])
    model, adapters = adapted(untied, adapter_name_or_path=str(adapter))
    batch = make_batch()
    with torch.no_grad():
        with adapters.disabled():
            base = plain_outputs(model, batch)["log_probs"]
        adapted_log_probs = plain_outputs(model, batch)["log_probs"]
        wanted = plain_outputs(plain_model(untied), batch)["log_probs"]
    assert torch.equal(base, wanted)
    assert (adapted_log_probs - wanted).abs().max() > 0.1
    assert {"lm_head.modules_to_save.default.weight"} <= {n for n, p in model.named_parameters() if p.requires_grad}


def merged(model: Any, adapters: Adapters) -> dict[str, torch.Tensor]:
    return {
        weight.name: merged_weight(*weight.parts, weight.scaling) if len(weight.parts) > 1 else weight.parts[0]
        for weight in adapters.merged(model.named_parameters())
    }


def test_merged_weights_are_those_of_the_adapted_model(untied: Path, tmp_path: Path) -> None:
    adapter = write_adapter(untied, tmp_path, whole=["lm_head"])
    model, adapters = adapted(untied, adapter_name_or_path=str(adapter))
    plain, batch = plain_model(untied), make_batch()
    plain.load_state_dict(merged(model, adapters))
    with torch.no_grad():
        wanted, actual = plain_outputs(model, batch), plain_outputs(plain, batch)
    torch.testing.assert_close(actual["log_probs"], wanted["log_probs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lora_target": "q_prj"},
            r"lora_target: no module of the model matches 'q_prj'; its linear layers are down_proj, gate_proj, k_proj",
        ),
        ({"lora_target": "q_proj,nothing"}, r"no module of the model matches 'nothing'"),
        ({"lora_target": r".*\.q_prj"}, r"no module of the model matches '\.\*\\\\\.q_prj'"),
        ({"lora_target": "lm_head"}, r"'lm_head' matches lm_head, which cannot have an adapter"),
        ({"lora_target": "embed_tokens"}, r"'embed_tokens' matches model\.embed_tokens, which cannot have an adapter"),
        ({"lora_target": "self_attn"}, r"matches model\.layers\.0\.self_attn, which cannot have an adapter"),
        (
            {"lora_target": "q_proj", "additional_target": "head"},
            r"additional_target: no module of the model is named 'head'; its modules are .*lm_head",
        ),
        ({"lora_target": "q_proj", "additional_target": "q_proj"}, r"which cannot have an adapter"),
    ],
)
def test_mistakes_are_named(untied: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapted(untied, **options)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("moe") / "model")


@pytest.mark.parametrize(
    ("target", "modules"),
    [
        ("experts", set()),
        ("all-linear,experts", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["q_proj", "mlp.experts"], {"q_proj"}),
    ],
)
def test_fused_experts_are_adapted_with_both_tensors(moe: Path, target: Any, modules: set[str]) -> None:
    """By the ends of names, as modules; the router stays as it is."""
    model, adapters = adapted(moe, lora_target=target, lora_rank=2)
    ends = {name.rpartition(".")[2] for name in targets(model)}
    assert ends == {"experts", "base_layer", *modules}, "one wrapper for each of the two tensors"
    experts = {f"model.layers.{layer}.mlp.experts.{tensor}" for layer in (0, 1) for tensor in EXPERT_TENSORS}
    assert experts == {weight for weight in adapters.scalings if not weight.endswith(".weight")}
    named = dict(model.named_parameters())
    assert all(named[part].requires_grad for weight in adapters.scalings for part in adapter_names(weight))
    assert not [name for name, p in named.items() if p.requires_grad and "lora_" not in name]


def test_merged_experts_are_those_of_the_adapted_model(moe: Path, tmp_path: Path) -> None:
    tensors = [f"experts.{tensor}" for tensor in EXPERT_TENSORS]
    adapter = write_adapter(moe, tmp_path, target=["q_proj"], tensors=tensors)
    model, adapters = adapted(moe, adapter_name_or_path=str(adapter))
    plain, batch, weights = plain_model(moe), make_batch(), merged(model, adapters)
    base = dict(plain.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"].detach().clone()
    plain.load_state_dict(weights)
    with torch.no_grad():
        wanted, actual = plain_outputs(model, batch), plain_outputs(plain, batch)
        with adapters.disabled():
            without = plain_outputs(model, batch)
    torch.testing.assert_close(actual["log_probs"], wanted["log_probs"], rtol=0, atol=1e-5)
    assert torch.equal(without["log_probs"], plain_outputs(plain_model(moe), batch)["log_probs"])
    name = "model.layers.1.mlp.experts.gate_up_proj"
    down, up = (dict(model.named_parameters())[part].detach() for part in adapter_names(name))
    rows = merged_rows(base.flatten(0, 1)[5 * 48 + 24 : 6 * 48], 5 * 48 + 24, base.shape, down, up, 2.0)
    torch.testing.assert_close(rows, weights[name][5, 24:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("target", ["mlp.experts.gate_up_proj", "down_proj", r".*\.experts"])
def test_experts_are_adapted_by_their_name_alone(moe: Path, target: str) -> None:
    with pytest.raises(ValueError, match=r"gate_up_proj and down_proj, one tensor each .* all-linear,experts"):
        adapted(moe, lora_target=target, lora_rank=2)


def test_experts_that_are_laid_out_otherwise_are_refused(moe: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"are not laid out as \(experts, out, in\) .* \(gpt-oss\)"):
        adapted(write_moe(tmp_path / "other", "gpt_oss"), lora_target="experts", lora_rank=2)
    adapter = write_adapter(moe, tmp_path / "adapter", target=["q_proj"], tensors=["experts.down_proj"])
    with pytest.raises(ValueError, match=r"target_parameters=\['experts.down_proj'\]; supported are both tensors"):
        adapted(moe, adapter_name_or_path=str(adapter))


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_tied_matrices_are_not_trained_apart(tied: Path, module: str) -> None:
    with pytest.raises(ValueError, match=rf"'{module}' cannot be trained .*ties its output matrix to its embeddings"):
        adapted(tied, lora_target="q_proj", additional_target=module)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, r"has use_dora=True, which is not supported"),
        ({"peft_type": "LOHA"}, r"is a .*LOHA adapter; only LoRA is supported"),
        ({"r": 3}, r"does not fit the model"),
        ({"target_modules": ["q_proj"]}, r"does not fit the model; \d+ tensors are missing on one side"),
        ({"target_modules": ["wq"]}, r"\(target_modules\): no module of the model matches 'wq'"),
    ],
)
def test_adapters_that_do_not_fit_are_named(tied: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    adapter = write_adapter(tied, tmp_path)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=rf"adapter_name_or_path: .*{message}"):
        adapted(tied, adapter_name_or_path=str(adapter))


def test_a_critic_does_not_start_from_a_policys_adapter(tied: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tied, tmp_path)
    with pytest.raises(ValueError, match="has no value head"):
        adapted(tied, head="value", adapter_name_or_path=str(adapter))


def test_without_peft_the_extra_is_named(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    args = ModelArguments(model_name_or_path=str(tied))
    model = build_model(args, "causal_lm")
    with pytest.raises(ImportError, match=re.escape(install_command("peft"))):
        add_adapters(model, replace(args, lora_target="q_proj"), seed=0, dtype=torch.float32)
