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


def test_a_new_adapter_changes_nothing_and_its_seed_decides(tied: Path) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    model, _ = adapted(tied, lora_target="q_proj")
    torch.manual_seed(12)
    again, _ = adapted(tied, lora_target="q_proj")
    first, second = dict(model.named_parameters()), dict(again.named_parameters())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert model.get_submodule("model.layers.0.self_attn.q_proj").scaling["default"] == 2, "alpha is twice the rank"
    batch = make_batch()
    with torch.no_grad():
        wanted, actual = plain_outputs(plain_model(tied), batch), plain_outputs(model, batch)
    assert torch.equal(actual["log_probs"], wanted["log_probs"])
    torch.manual_seed(11)
    assert torch.equal(before, torch.get_rng_state())


def merged(model: Any, adapters: Adapters) -> dict[str, torch.Tensor]:
    return {
        weight.name: merged_weight(*weight.parts, weight.scaling) if len(weight.parts) > 1 else weight.parts[0]
        for weight in adapters.merged(model.named_parameters())
    }


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


NO_MODULE, CANNOT = "no module of the model matches", "which cannot have an adapter"
EXPERTS = r"gate_up_proj and down_proj, one tensor each .* all-linear,experts"
TIED = "cannot be trained .*ties its output matrix to its embeddings"


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        ("untied", "q_prj", rf"lora_target: {NO_MODULE} 'q_prj'; its linear layers are down_proj, gate_proj, k_proj"),
        ("untied", "q_proj,nothing", rf"{NO_MODULE} 'nothing'"),
        ("untied", r".*\.q_prj", rf"{NO_MODULE} '\.\*\\\\\.q_prj'"),
        ("untied", "lm_head", rf"'lm_head' matches lm_head, {CANNOT}"),
        ("untied", "embed_tokens", rf"'embed_tokens' matches model\.embed_tokens, {CANNOT}"),
        ("untied", "self_attn", rf"matches model\.layers\.0\.self_attn, {CANNOT}"),
        ("untied", "q_proj + head", "additional_target: no module .* is named 'head'; its modules are .*lm_head"),
        ("untied", "q_proj + q_proj", CANNOT),
        ("tied", "q_proj + embed_tokens", rf"'embed_tokens' {TIED}"),
        ("tied", "q_proj + lm_head", rf"'lm_head' {TIED}"),
        ("moe", "mlp.experts.gate_up_proj", EXPERTS),
        ("moe", "down_proj", EXPERTS),
        ("moe", r".*\.experts", EXPERTS),
        ("gpt_oss", "experts", r"are not laid out as \(experts, out, in\) .* \(gpt-oss\)"),
    ],
)
def test_mistakes_are_named(
    model: str, target: str, message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """``+`` stands before a module that is trained in full."""
    folder = write_moe(tmp_path, model) if model == "gpt_oss" else request.getfixturevalue(model)
    lora, _, whole = target.partition(" + ")
    with pytest.raises(ValueError, match=message):
        adapted(folder, lora_target=lora, lora_rank=2, **({"additional_target": whole} if whole else {}))


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


def test_adapters_of_another_head_and_of_one_tensor_of_experts_are_refused(
    tied: Path, moe: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="has no value head"):
        adapted(tied, head="value", adapter_name_or_path=str(write_adapter(tied, tmp_path / "policy")))
    adapter = write_adapter(moe, tmp_path / "experts", target=["q_proj"], tensors=["experts.down_proj"])
    with pytest.raises(ValueError, match=r"target_parameters=\['experts.down_proj'\]; supported are both tensors"):
        adapted(moe, adapter_name_or_path=str(adapter))


def test_without_peft_the_extra_is_named(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    args = ModelArguments(model_name_or_path=str(tied))
    model = build_model(args, "causal_lm")
    with pytest.raises(ImportError, match=re.escape(install_command("peft"))):
        add_adapters(model, replace(args, lora_target="q_proj"), seed=0, dtype=torch.float32)
