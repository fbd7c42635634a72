"""``roll export``: what it writes is the checkpoint's model, whichever strategy and however many ranks wrote that."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from roll import cli
from roll.checkpoint import CheckpointManager, export
from roll.checkpoint.contents import FORMAT, STATE_NAME, ModelContents
from roll.checkpoint.tensors import WEIGHT, Piece, Pieces
from roll.config.installation import install_command
from roll.config.roles import WorkerConfig
from roll.tracking import TrackedRun, build_trackers
from tests.strategies import jobs
from tests.strategies.samples import TensorBatch, plain_model, policy_loss
from tests.support.hub_server import hub

ADAPTERS = {"lora_target": ["q_proj", "o_proj"], "lora_rank": 4, "lora_alpha": 8}


def checkpoint_of(model: Path, root: Path, trained: dict[str, torch.Tensor], **contents: Any) -> Path:
    """A checkpoint as two ranks write it, each the half of every tensor."""
    described = ModelContents(
        "fsdp2_train", {name: list(t.shape) for name, t in trained.items()}, path=str(model), **contents
    )
    with CheckpointManager(root).writing(7) as folder:
        role = folder / "actor_train"
        for rank in range(2):
            halves = {name: (t.flatten().chunk(2)[rank], rank * (-(-t.numel() // 2))) for name, t in trained.items()}
            Pieces([Piece(name, {WEIGHT: half}, start) for name, (half, start) in halves.items()]).write(role, rank)
        state = {"format": FORMAT, "world_size": 2, "step": 7, "model": asdict(described)}
        (role / STATE_NAME).write_text(json.dumps(state))
    return root / "checkpoint-7"


def changed(model: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: p.detach() + 0.1 * torch.randn(p.shape) for name, p in plain_model(model).named_parameters()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_folder_is_written_and_compared(tied_model, tmp_path, dtype):
    trained = changed(tied_model)
    checkpoint = checkpoint_of(tied_model, tmp_path / "run/checkpoints", trained)
    (tmp_path / "model").mkdir()
    output = tmp_path / "out"
    words = [str(tmp_path / "run" if dtype == "fp32" else checkpoint), "--output", str(output), "--dtype", dtype]
    assert cli.main(["export", *words]) == 0
    written = load_file(output / "model.safetensors")
    wanted = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert written.keys() == trained.keys()
    assert all(torch.equal(written[name], tensor.to(wanted)) for name, tensor in trained.items())
    assert {"config.json", "generation_config.json"} <= {file.name for file in output.iterdir()}
    with pytest.raises(SystemExit):
        cli.main(["export"])
    assert cli.main(["export", *words]) == 2, "it exists already"


def test_an_adapter_is_written_and_merged(untied_model, tmp_path):
    pytest.importorskip("peft")
    torch.manual_seed(3)
    path = "model.layers.1.mlp.down_proj"
    shapes = {f"{path}.lora_A.default.weight": (4, 48), f"{path}.lora_B.default.weight": (32, 4)}
    trained = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    checkpoint = checkpoint_of(untied_model, tmp_path, trained, scalings={f"{path}.weight": 2.0})
    for form in ("peft", "hf"):
        assert cli.main(["export", str(checkpoint), "--to", form, "--output", str(tmp_path / form)]) == 0
    merged = load_file(tmp_path / "hf" / "model.safetensors")
    base = plain_model(untied_model).state_dict()
    down, up = trained.values()
    torch.testing.assert_close(merged[f"{path}.weight"], base[f"{path}.weight"] + 2.0 * up @ down)
    assert all(torch.equal(merged[name], tensor) for name, tensor in base.items() if not name.startswith(path))


def test_a_reward_model_is_exported_as_a_sequence_classifier(untied_model, tmp_path):
    body = {name: tensor for name, tensor in changed(untied_model).items() if name != "lm_head.weight"}
    trained = {**body, "score.weight": torch.randn(1, 32)}
    checkpoint = checkpoint_of(untied_model, tmp_path, trained)
    output = tmp_path / "out"
    assert cli.main(["export", str(checkpoint), "--output", str(output), "--dtype", "fp32"]) == 0
    written = AutoModelForSequenceClassification.from_pretrained(output, dtype=torch.float32).state_dict()
    assert written.keys() == trained.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in trained.items())
    assert cli.main(["export", str(checkpoint), "--to", "gguf", "--output", str(tmp_path / "gguf")]) == 2


RUN: dict[str, Any] = {
    "pipeline": "rlvr",
    "seed": 3,
    "pretrain": "Qwen/Qwen2.5-0.5B",
    "estimator": "grpo",
    "actor_train": {"data_args": {"file_name": ["hub:openai/gsm8k", "/home/me/more.jsonl"]}},
    "validation": {"data_args": {"file_name": "test.jsonl"}},
}
PANELS = [{"title": "Validation accuracy", "keys": ["val/*/accuracy"]}, {"title": "Nothing", "keys": ["nothing"]}]
TOKEN = "hf_" + "q7" * 17


@pytest.mark.parametrize("public", [False, True], ids=["private", "public"])
def test_an_export_is_pushed_with_a_model_card_of_its_run(tied_model, tmp_path, monkeypatch, caplog, capfd, public):
    run, output = tmp_path / "run", tmp_path / "out"
    checkpoint_of(tied_model, run / "checkpoints", changed(tied_model))
    (run / "config.yaml").write_text(yaml.safe_dump(RUN))
    (run / "record").mkdir()
    (run / "record/run.json").write_text(json.dumps({"pipeline": "rlvr", "log_dir": "logs", "panels": PANELS}))
    tracker = build_trackers("jsonl", {}, TrackedRun(run / "logs", "run", {}))
    for step, accuracy in ((0, 0.25), (5, 0.5), (9, 0.75)):
        tracker.log({"val/all/accuracy": accuracy}, step)
    tracker.close()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    caplog.set_level(logging.DEBUG)
    with hub(TOKEN) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        words = ["export", str(run), "--output", str(output), "--dtype", "fp32", "--push", "me/my-model"]
        assert cli.main([*words, *(["--public"] if public else [])]) == 0
    assert server.repositories["me/my-model"].get("private") is not public
    files = server.files["me/my-model"]
    assert files["model.safetensors"] == (output / "model.safetensors").read_bytes()
    assert yaml.safe_load(files["training_config.yaml"]) == RUN
    _, head, card = files["README.md"].decode().split("---\n", 2)
    described = yaml.safe_load(head)
    assert (described["base_model"], described["datasets"]) == ("Qwen/Qwen2.5-0.5B", ["openai/gsm8k"])
    assert (described["library_name"], described["tags"]) == ("transformers", ["roll", "rlvr", "grpo"])
    assert "| `val/all/accuracy` | 0.25 (step 0) | 0.75 (step 9) |" in card
    assert "| data | openai/gsm8k, more.jsonl |" in card and "/home/me" not in card and "test.jsonl" not in card
    assert "| steps | 7 |" in card and "roll run training_config.yaml" in card
    assert (
        TOKEN not in caplog.text + "".join(capfd.readouterr()) and f"pushed to {server.url}/me/my-model" in caplog.text
    )


def test_a_push_that_is_refused_keeps_the_export(tied_model, tmp_path, monkeypatch, caplog, capsys):
    checkpoint = checkpoint_of(tied_model, tmp_path, changed(tied_model))
    words = ["export", str(checkpoint), "--output", str(tmp_path / "out"), "--dtype", "fp32", "--no-check", "--push"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert cli.main([*words, "me/my-model"]) == 2 and "HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert cli.main([*words, "a/b/c"]) == 2 and "a/b/c" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with hub("another") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert cli.main([*words, "me/my-model"]) == 1
    assert "is kept, and could not be pushed: " in caplog.text and "401" in caplog.text and TOKEN not in caplog.text
    assert (tmp_path / "out/model.safetensors").is_file() and not server.files


def test_nothing_is_kept_of_an_export_that_is_another_model(tied_model, tmp_path, monkeypatch):
    checkpoint = checkpoint_of(tied_model, tmp_path, changed(tied_model))
    write_hf = export.write_hf

    def spoiled(trained: Any, folder: Path, dtype: torch.dtype) -> None:
        write_hf(trained, folder, dtype)
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"] *= 1.5
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(export, "write_hf", spoiled)
    assert cli.main(["export", str(checkpoint), "--output", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_said(tied_model, tmp_path, capsys):
    checkpoint = checkpoint_of(tied_model, tmp_path, changed(tied_model))
    shutil.copytree(checkpoint / "actor_train", checkpoint / "student_train")
    wrong = {
        "holds actor_train, student_train; name one": [],
        "holds nothing for role 'critic'": ["--role", "critic"],
        "holds no adapters": ["--role", "actor_train", "--to", "peft"],
        "one of bf16, fp16, fp32": ["--role", "actor_train", "--dtype", "int4"],
    }
    for said, words in wrong.items():
        assert cli.main(["export", str(checkpoint), *words, "--output", str(tmp_path / "out")]) == 2
        assert said in " ".join(capsys.readouterr().err.split()), said
    assert cli.main(["export", str(tmp_path / "gone")]) == 2


def train_and_save(role: WorkerConfig, batch: TensorBatch, folder: Path) -> None:
    strategy = jobs.started(role, 10, max_grad_norm=1.0)
    for _ in range(2):
        strategy.train_step(batch, policy_loss, jobs.POLICY)
    strategy.save(folder / "checkpoint-2" / "actor_train")
    strategy.save_hf(folder / "wanted")
    strategy.saved()


@pytest.mark.long
@pytest.mark.default_rows("2-zero3-*", "4-megatron-*", "2-fsdp2-*")
@pytest.mark.parametrize(
    ("world", "strategy", "config", "kind"),
    [
        (4, "fsdp2", {"fsdp_size": 2}, "dense"),
        (2, "zero3", {}, "dense"),
        (4, "megatron", {"tp": 2, "pp": 2}, "dense"),
        (2, "megatron", {"ep": 2}, "moe"),
        (2, "fsdp", {}, "moe"),
        (2, "megatron", {"tp": 2}, "adapters"),
        (2, "zero1", {}, "adapters"),
        (2, "fsdp2", {}, "adapted experts"),
    ],
)
def test_it_is_what_the_run_would_have_exported(run, untied_model, moe_folder, tmp_path, world, strategy, config, kind):
    pytest.importorskip("peft")
    model = moe_folder("qwen3_moe") if kind in ("moe", "adapted experts") else untied_model
    targets = {"adapters": {}, "adapted experts": {"lora_target": ["q_proj", "experts"]}}
    options = {"model_args": ADAPTERS | targets[kind]} if kind in targets else {}
    run(train_and_save, world, strategy, model, tmp_path / "run", config=config, **options)
    output = tmp_path / "out"
    assert (
        export.main([str(tmp_path / "run/checkpoint-2/actor_train"), "--output", str(output), "--dtype", "fp32"]) == 0
    )
    written, wanted = (load_file(path / "model.safetensors") for path in (output, tmp_path / "run/wanted"))
    assert written.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(written[name], tensor, rtol=0, atol=1e-6 if kind in targets else 0)
    if kind in targets:
        words = [str(tmp_path / "run/checkpoint-2/actor_train"), "--to", "peft", "--output", str(tmp_path / "adapter")]
        assert export.main(words) == 0


@pytest.mark.long
@pytest.mark.default_rows("q8_0-qwen3", "f32-llama")
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_a_gguf_file_computes_the_same(folders, tmp_path, name, dtype):
    pytest.importorskip("gguf")
    model = folders.get(name) or llama(folders["qwen3"], tmp_path / "llama")
    checkpoint = checkpoint_of(model, tmp_path, changed(model))
    output = tmp_path / "out"
    words = [str(checkpoint), "--to", "gguf", "--output", str(output), "--dtype", dtype]
    assert cli.main(["export", *words]) == 0
    assert [file.name for file in output.iterdir()] == ["model.gguf"]
    from gguf import GGUFReader

    fields = GGUFReader(output / "model.gguf").fields
    config = plain_model(model).config
    for key, wanted in {
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "feed_forward_length": config.intermediate_size,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }.items():
        assert fields[f"{name}.{key}"].contents() == wanted
    from transformers import AutoTokenizer

    tokens = fields["tokenizer.ggml.tokens"].contents()
    own = AutoTokenizer.from_pretrained(model).get_vocab()
    assert all(tokens[index] == token for token, index in own.items()) and len(tokens) == config.vocab_size


def llama(tokenizer: Path, folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shutil.copytree(tokenizer, folder)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_without_gguf_the_error_names_the_extra(tied_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    checkpoint = checkpoint_of(tied_model, tmp_path, changed(tied_model))
    assert cli.main(["export", str(checkpoint), "--to", "gguf", "--output", str(tmp_path / "out")]) == 2
    assert install_command("gguf") in capsys.readouterr().err
