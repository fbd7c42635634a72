"""GGUF files as models: read completely or refused, once, into the cache, from which every role loads them."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll import cli
from roll.checkpoint.forms import rounded
from roll.config import model_files
from roll.config.installation import install_command
from roll.config.model_files import dequantised_folder, loadable, model_config
from roll.config.roles import ModelArguments
from roll.models import gguf_reading
from roll.models.build import build_model
from roll.models.gguf_reading import dequantise, describe, is_dequantised
from roll.training_service.command import build_parser, read_options, start
from tests.strategies.engine_models import save_model
from tests.strategies.test_export import changed, checkpoint_of, llama

gguf = pytest.importorskip("gguf")

RECIPE = """
pretrain: to be given
rollout_batch_size: 2
num_return_sequences_in_group: 2
prompt_length: 16
response_length: 8
max_steps: 1
output_dir: FOLDER/output
actor_train:
  training_args: {per_device_train_batch_size: 4, gradient_accumulation_steps: 1}
  data_args: {file_name: FOLDER/prompts.jsonl, prompt: prompt}
  strategy_args: {strategy_name: fsdp2_train}
actor_infer: {strategy_args: {strategy_name: hf_infer}}
rewards: {text: {worker_cls: exact_match}}
"""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model's folder, its weights after training, and GGUF files of them by type."""
    root = tmp_path_factory.mktemp("gguf")
    model = llama(save_model("qwen3", root / "tokenizer"), root / "llama")
    weights = changed(model)
    checkpoint = checkpoint_of(model, root, weights)
    files = {}
    for dtype in ("f32", "f16", "q8_0"):
        words = [str(checkpoint), "--to", "gguf", "--output", str(root / dtype), "--dtype", dtype]
        assert cli.main(["export", *words]) == 0
        files[dtype] = root / dtype / "model.gguf"
    return {"model": model, "weights": weights, **files}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b", "ground_truth": "c"}\n' * 4)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    return tmp_path / "recipe.yaml"


def log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.log_softmax(-1)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_what_export_writes_is_read_as_the_same_model(trained: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    folder = loadable(str(trained[dtype]))
    assert folder == str(dequantise(trained[dtype]))
    ids = torch.randint(0, 320, (3, 40), generator=torch.Generator().manual_seed(0))
    wanted = AutoModelForCausalLM.from_pretrained(trained["model"], dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in wanted.named_parameters():
            parameter.copy_(rounded(trained["weights"][name], dtype))
    found = build_model(ModelArguments(model_name_or_path=folder), "causal_lm")
    torch.testing.assert_close(log_probs(found, ids), log_probs(wanted, ids), rtol=0, atol=2e-6)
    if dtype == "f32":
        assert all(torch.equal(p, trained["weights"][name]) for name, p in found.named_parameters())
        copies = [dequantise(Path(shutil.copyfile(trained[one], tmp_path / "model.gguf"))) for one in ("f32", "f16")]
        assert copies[0] != copies[1], "a file with other contents is another model"
    text = "Ada has 12 apples, and gives 7 of them away.\n"
    own, read = (AutoTokenizer.from_pretrained(path) for path in (trained["model"], folder))
    # A GGUF file has a token for every row of the embeddings.
    assert own.get_vocab().items() <= read.get_vocab().items() and read(text)["input_ids"] == own(text)["input_ids"]
    assert read.eos_token == own.eos_token


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_check_reads_the_header_alone(trained: dict[str, Any], recipe: Path, is_folder: bool) -> None:
    path = trained["f16"].parent if is_folder else trained["f16"]
    assert cli.main(["check", str(recipe), f"pretrain={path}"]) == 0
    folder = dequantised_folder(trained["f16"])
    config = model_config(str(path))
    assert config is not None and config["architectures"] == ["LlamaForCausalLM"] and config["hidden_size"] == 64
    assert not is_dequantised(trained["f16"])
    written = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert cli.main(["check", str(recipe), f"pretrain={path}"]) == 0
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == written, "it was read once"


def test_every_command_finds_the_same_folder(
    trained: dict[str, Any], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from roll.evaluate import load_evaluation
    from roll.preflight import dequantise_models

    path, rows = str(trained["f16"]), str(recipe.with_name("prompts.jsonl"))
    words = ["init", "grpo", "--model", path, "--data", rows, "--output", str(recipe.with_name("grpo.yaml"))]
    assert cli.main(words) == cli.main(["check", str(recipe.with_name("grpo.yaml"))]) == 0
    assert not is_dequantised(trained["f16"]), "its header is enough"
    capsys.readouterr()
    rehearsed = ["rehearse", str(recipe), f"pretrain={path}", "--json", "--no-suggestions"]
    assert cli.main(rehearsed) == 0
    assert json.loads(capsys.readouterr().out)
    overrides = [f"pretrain={path}", f"+validation.data_args.file_name={rows}"]
    overrides.append("+validation.data_args.prompt=prompt")
    both = {"models": {"one": path, "other": str(trained["f32"])}}
    loaded = load_evaluation(str(recipe), None, overrides, both)
    assert loaded.plan.roles["actor_infer"].model_path == str(dequantised_folder(trained["f16"]))
    said: list[str] = []
    dequantise_models(loaded, said.append)
    assert is_dequantised(trained["f16"]) and is_dequantised(trained["f32"]) and len(said) == 2
    dequantise_models(loaded, said.append)
    assert len(said) == 2, "it was dequantised once"


def test_the_training_service_reads_it(trained: dict[str, Any], tmp_path: Path) -> None:
    words = [str(trained["f32"]), "--model-name", "own", "--port", "0", "--output", str(tmp_path / "service")]
    server = start(read_options(build_parser().parse_args([*words, "--dtype", "fp32", "--max-length", "32"])))
    try:
        with urllib.request.urlopen(f"{server.url}/api/v1/get_server_capabilities") as response:
            assert json.load(response)["supported_models"][0]["model_name"] == "own"
    finally:
        server.close()
    assert is_dequantised(trained["f32"])


def altered(
    source: Path, path: Path, architecture: str = "llama", tensors: dict[str, int] | None = None, **entries: Any
) -> Path:
    """A copy of a file under another architecture, with vectors of a length added, and entries (value and type) added
    or replaced."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, architecture)
    added = {f"{architecture}.{key.replace('__', '.')}": entry for key, entry in entries.items()}
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", *added):
            kind = entry.types[0]
            writer.add_key_value(name, entry.contents(), kind, entry.types[-1] if len(entry.types) > 1 else None)
    for name, (value, kind) in added.items():
        writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, length in (tensors or {}).items():
        writer.add_tensor(name, np.ones(length, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.long
def test_what_transformers_cannot_read_is_refused(
    trained: dict[str, Any], tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text, number = trained["f16"], gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT32
    (tmp_path / "cut.gguf").write_bytes(source.read_bytes()[:2000])
    (tmp_path / "text.gguf").write_text("no GGUF file at all")
    (tmp_path / "model.txt").write_text("no GGUF file at all")
    several = tmp_path / "several"
    several.mkdir()
    for name in ("a.gguf", "b.gguf"):
        shutil.copyfile(source, several / name)
    wrong = {
        "architecture rwkv7": altered(source, tmp_path / "rwkv.gguf", "rwkv7"),
        "ignores rope_freqs.weight": altered(source, tmp_path / "freqs.gguf", tensors={"rope_freqs.weight": 8}),
        "llama.rope.scaling.type yarn": altered(source, tmp_path / "yarn.gguf", rope__scaling__type=("yarn", text)),
        "llama.attention.key_length 32": altered(source, tmp_path / "heads.gguf", attention__key_length=(32, number)),
        "cannot be read by transformers": tmp_path / "cut.gguf",
        "GGUF magic": tmp_path / "text.gguf",
        "neither a model folder nor a .gguf file": tmp_path / "model.txt",
        "2 GGUF files, of which one must be named: a.gguf, b.gguf": several,
        "no such file": tmp_path / "gone.gguf",
    }
    for said, path in wrong.items():
        assert cli.main(["check", str(recipe), f"pretrain={path}"]) == 2, said
        error = " ".join(capsys.readouterr().err.split())
        assert said in error and "pretrain" in error and str(path) in error, (said, error)


def test_a_missing_package_is_found_by_the_check(
    trained: dict[str, Any], recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        gguf_reading, "is_installed", lambda module: module != "gguf" and model_files.is_installed(module)
    )
    assert cli.main(["check", str(recipe), f"pretrain={trained['q8_0']}"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "pretrain" in error and install_command("gguf") in error


def test_nothing_is_kept_of_weights_that_were_not_written(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = describe(trained["f32"])
    before = sorted(folder.iterdir())
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
        dequantise(trained["f32"])
    assert sorted(folder.iterdir()) == before and list(folder.parent.iterdir()) == [folder]
    assert is_dequantised(trained["f32"]) is False
    dequantise(trained["f32"])
    assert is_dequantised(trained["f32"])
