"""A language model whose folder also holds a vision tower: trained without it, written with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from roll import cli
from roll.config.roles import ModelArguments
from roll.datasets.vision_model import VisionModel
from roll.models.build import build_model, has_tied_embeddings
from roll.models.loading import build_on_meta
from tests.strategies import jobs, sync_cases
from tests.strategies.comparison import assert_step_equals, plain_results, rounding_of
from tests.strategies.hf_infer.helpers import make_tokenizer
from tests.strategies.published_models import PUBLISHED, is_apart
from tests.strategies.samples import make_batch, plain_model

CHECKPOINTED = {"model_args": {"disable_gradient_checkpointing": False}}
STRATEGIES = ("fsdp2", "fsdp", "zero1", "zero2", "zero3")
ADAPTERS = {"lora_target": "all-linear", "lora_rank": 2}


def training() -> dict[str, tuple[str, str, dict[str, Any]]]:
    found: dict[str, tuple[str, str, dict[str, Any]]] = {
        f"{family}-{strategy}": (family, strategy, {}) for family in PUBLISHED for strategy in STRATEGIES
    }
    found |= {f"qwen3_next-{strategy}": ("qwen3_next", strategy, {}) for strategy in STRATEGIES[1:]}
    found |= {f"qwen3_5_text-{strategy}": ("qwen3_5_text", strategy, {}) for strategy in ("fsdp2", "zero3")}
    found["qwen3_5_moe-ep2"] = ("qwen3_5_moe", "fsdp2", {"config": {"ep_size": 2}})
    found |= {f"qwen3_5-{s}-checkpointed": ("qwen3_5", s, CHECKPOINTED) for s in ("fsdp2", "zero3")}
    return found


@pytest.mark.long
@pytest.mark.default_rows("qwen3_5-zero3")
@pytest.mark.parametrize("case", training())
def test_gradient_and_outputs_equal_the_plain_model(run, family, case):
    name, strategy, options = training()[case]
    folder = family(name)
    results = run(jobs.train, 2, strategy, folder, **options)
    assert_step_equals(results, plain_results(folder), rounding_of(folder, make_batch()))


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_plain_model_is_the_language_part_of_the_whole(family, name):
    whole = AutoModelForImageTextToText.from_pretrained(family(name), dtype=torch.float32).eval()
    batch = make_batch()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].long()}
    part = build_model(ModelArguments(str(family(name))), "causal_lm").eval()
    with torch.no_grad():
        found, wanted = part(**inputs).logits, whole(**inputs).logits
    assert float((found - wanted)[batch["attention_mask"]].abs().max()) < 1e-5


@pytest.mark.matrix
def test_experts_that_are_stored_as_one_tensor(run, family, tmp_path):
    """Read row by row, sent matrix by matrix, written as they were."""
    source = tmp_path / "model"
    shutil.copytree(family("qwen3_5_moe"), source)
    make_tokenizer().save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    model = plain_model(source)
    fused = {name: tensor for name, tensor in model.state_dict().items() if ".mlp.experts." in name}
    kept = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in fused.items()}
    save_file(kept | renamed, source / "model.safetensors", metadata={"format": "pt"})
    meta = build_on_meta(ModelArguments(str(source)), "causal_lm")
    assert meta is not None
    meta.read(meta.language_model, torch.device("cpu"))
    found = meta.language_model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    options = {"dtype": "bf16", "config": {"ep_size": 2}}
    run(sync_cases.train_and_sync, 2, "fsdp2", source, tmp_path / "sent", [("safetensors", "delta")], **options)
    run(jobs.export, 2, "fsdp2", source, tmp_path / "out", batch=None)
    assert_whole(source, tmp_path / "out")


def test_only_the_whole_says_that_matrices_are_tied(family, tmp_path):
    """transformers' own class for the language model would draw an output matrix."""
    shutil.copytree(family("qwen3_5"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ModelArguments(str(tmp_path))
    assert has_tied_embeddings(build_model(args, "causal_lm"))
    meta = build_on_meta(args, "causal_lm")
    assert meta is not None and has_tied_embeddings(meta.language_model)


@pytest.mark.default_rows("qwen3_5_moe-causal_lm", "qwen3_5-score")
@pytest.mark.parametrize("head", ["causal_lm", "value", "score"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_each_rank_reads_its_rows(family, name, head):
    """Nothing of the tower is loaded, and no rank holds the whole model."""
    args = ModelArguments(str(family(name)))
    meta = build_on_meta(args, head)
    assert meta is not None
    meta.read(meta.language_model, torch.device("cpu"))
    found, wanted = meta.language_model.state_dict(), build_model(args, head).state_dict()
    assert found.keys() == wanted.keys() and not any("visual" in key for key in found)
    assert all(torch.equal(found[key], wanted[key]) for key in found)


@pytest.mark.default_rows("qwen3_5-fsdp2")
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp", "zero3"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_has_the_published_form(run, family, tmp_path, name, strategy):
    """Names, the tower's bits and the configuration; transformers loads both the language model and the whole."""
    source = family(name)
    run(jobs.export, 2, strategy, source, tmp_path, batch=None)
    assert_whole(source, tmp_path)


def assert_whole(source: Path, written: Path) -> None:
    before, after = load_file(source / "model.safetensors"), load_file(written / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, written)]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert configs[0]["vision_config"] == configs[1]["vision_config"]
    whole = AutoModelForImageTextToText.from_pretrained(written, dtype=torch.float32)
    original = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    assert all(map(torch.equal, whole.state_dict().values(), original.state_dict().values()))
    assert all(map(torch.equal, plain_model(written).state_dict().values(), plain_model(source).state_dict().values()))


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["fsdp2", "zero3", "adapters"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_checkpoint_is_exported_and_its_weights_arrive_in_an_engine(run, family, tmp_path, name, case):
    """After the steps of a run: what ``roll export`` writes is compared with the checkpoint by itself."""
    source = family(name)
    make_tokenizer().save_pretrained(source)
    model_args = ADAPTERS if case == "adapters" else {}
    options = {"model_args": model_args, "dtype": "bf16", "training": {"learning_rate": 1e-3}}
    strategy = "fsdp2" if case == "adapters" else case
    run(sync_cases.train_and_sync, 2, strategy, source, tmp_path / "sent", [("shared_memory", "trained")], **options)
    options["dtype"] = "fp32"
    run(jobs.train_and_save, 2, strategy, source, tmp_path / "checkpoint", 1, **options)
    output = tmp_path / "out"
    words = [str(tmp_path / "checkpoint"), "--output", str(output), "--dtype", "fp32"]
    assert cli.main(["export", *words]) == 0
    before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        if is_apart(key):
            assert torch.equal(after[key], tensor)
    moved = "model.language_model.layers.3.self_attn.q_proj.weight"
    assert not torch.equal(after[moved], before[moved])
    AutoModelForImageTextToText.from_pretrained(output)


def test_the_tower_is_not_asked_for_images(family):
    """Rows with images are refused by the reader of a model of text."""
    assert VisionModel.load(str(family("qwen3_5")), make_tokenizer(), False) is None


@pytest.mark.long
def test_packed_rows_are_refused(run, family):
    for message in run(jobs.refused, 2, "fsdp2", family("qwen3_5"), 10, batch=None, use_sequence_packing=True):
        assert "layers of type linear_attention" in message and "Set use_sequence_packing: false" in message
