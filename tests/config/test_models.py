"""Findings of ``roll check`` and of the start of a run about a model: its family, its shape, its presence."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll import preflight
from roll.config.checks.roles import family_problem
from roll.config.loader import load_config
from roll.config.model_files import FAMILIES, NEEDS, SUPPORT, layer_classes, missing, model_folder, needed
from roll.config.reading.errors import ConfigError, Problem
from roll.config.roles import StrategyArguments, WorkerConfig
from tests.config.good import GOOD, changed, write_rows

DENSE: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
}
INFER = "actor_infer.strategy_args.strategy_config"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    (tmp_path / "model").mkdir()
    return tmp_path


def found(folder: Path, model: dict[str, Any], **changes: Any) -> tuple[Problem, ...]:
    (folder / "model" / "config.json").write_text(json.dumps(model))
    (folder / "run.yaml").write_text(yaml.safe_dump(changed({"pretrain": "./model", **copy.deepcopy(changes)}, GOOD)))
    try:
        load_config(None, folder / "run.yaml")
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    ("model", "needs"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 128}, ["experts"]),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, ["experts"]),
        ({"model_type": "mixtral", "num_local_experts": 8}, ["experts"]),
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}, ["vision"]),
        (
            {"model_type": "qwen3_vl_moe", "vision_config": {}, "text_config": {"num_experts": 8}},
            ["vision", "experts", "vision and experts"],
        ),
        ({"model_type": "llava", "vision_config": {}}, ["other vision"]),
        ({"model_type": "qwen3_omni_moe", "thinker_config": {"audio_config": {"d": 1}}}, ["audio"]),
        ({"model_type": "qwen3_next", "num_experts": 512}, ["experts", "recurrent"]),
        ({"model_type": "somebody", "layer_types": ["linear_attention", "full_attention"]}, ["recurrent"]),
        ({"model_type": "t5", "is_encoder_decoder": True}, ["encoder"]),
        ({**DENSE, "layer_types": ["full_attention", "sliding_attention"], "num_experts": None}, []),
        ({**DENSE, "num_local_experts": 1, "is_encoder_decoder": False}, []),
    ],
)
def test_families_are_recognised(folder: Path, model: dict[str, Any], needs: list[str]) -> None:
    assert sorted(needed(model)) == sorted(needs)
    problems = found(folder, model)
    lacking = missing(model, "fsdp2_train") or missing(model, "hf_infer")
    assert [problem.key for problem in problems] == (["pretrain"] if lacking else [])
    for name in lacking:
        assert NEEDS[name] in problems[0].rule and problems[0].example is None


@pytest.mark.parametrize(
    ("model", "strategy", "words"),
    [
        ({"model_type": "glm4_moe", "num_experts": 8}, "vllm", None),
        ({"model_type": "gpt_oss", "num_experts": 8}, "vllm", None),
        ({"model_type": "qwen3_vl_moe", "vision_config": {}, "text_config": {"num_experts": 8}}, "vllm", None),
        ({"model_type": "deepseek_v3", "num_experts": 8}, "vllm", "are not the model's"),
        ({"model_type": "qwen3_next", "num_experts": 8}, "vllm", None),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "sglang", "no image processor"),
    ],
)
def test_an_engine_says_why_it_lacks_a_family(model: dict[str, Any], strategy: str, words: str | None) -> None:
    role = WorkerConfig("actor_infer", strategy_args=StrategyArguments(strategy, {}))
    problem = family_problem(model, "actor_infer", role)
    assert problem is None if words is None else words in str(problem) and "hf_infer computes it" in str(problem)


RECURRENT = {**DENSE, "layer_types": ["linear_attention"]}


def test_a_family_becomes_available_by_its_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUPPORT, "recurrent", ("fsdp2", "hf_infer"))
    assert found(folder, RECURRENT) == ()
    monkeypatch.setitem(SUPPORT, "recurrent", ())
    monkeypatch.setitem(FAMILIES["recurrent"], "qwen2", ("fsdp2", "hf_infer"))
    assert found(folder, RECURRENT) == ()


def test_a_judge_by_an_engine_may_be_of_any_family(folder: Path) -> None:
    (folder / "judge").mkdir()
    (folder / "judge" / "config.json").write_text(json.dumps(RECURRENT))
    judge = {
        "rewards.math.worker_cls": "llm_judge",
        "rewards.math.judge_model_type": "cluster",
        "reward_model": {
            "device_mapping": [2],
            "model_args": {"model_name_or_path": "./judge"},
            "strategy_args": {"strategy_name": "vllm"},
        },
    }
    assert found(folder, DENSE, **judge) == ()
    judge["reward_model"]["strategy_args"] = {"strategy_name": "hf_infer"}  # type: ignore[index]
    assert "linear-attention" in found(folder, DENSE, **judge)[0].rule


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', ""])
def test_a_config_that_is_none(folder: Path, text: str) -> None:
    found(folder, DENSE)
    (folder / "model" / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a model folder"):
        load_config(None, folder / "run.yaml")


def test_layer_classes_are_those_of_transformers() -> None:
    assert "Qwen2DecoderLayer" in layer_classes("qwen2")
    assert layer_classes("no_such_model") == layer_classes("../x") == frozenset()


def test_a_hub_name_is_found_in_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    assert model_folder("owner/model") is None and found(folder, DENSE, pretrain="owner/model") == ()
    snapshot = folder / "hub" / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "hub" / "models--owner--model" / "refs").mkdir()
    (folder / "hub" / "models--owner--model" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(RECURRENT))
    (problem,) = found(folder, DENSE, pretrain="owner/model")
    assert "model_type qwen2: a model with linear-attention or state-space layers" in problem.rule


def test_offline_and_not_in_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (problem,) = found(folder, DENSE, pretrain="owner/model")
    assert problem.key == "pretrain" and "is not in the local cache, and HF_HUB_OFFLINE" in problem.rule


def test_a_hub_that_does_not_answer_takes_bounded_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    silent = threading.Event()
    monkeypatch.setattr(preflight, "_download", lambda path: silent.wait(60))
    assert "no answer from the hub within 0.05 seconds" in str(preflight.fetch("owner/model", 0.05))
    silent.set()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a model's ``config.json`` takes."""

    def answer(self, with_body: bool) -> None:
        is_api, known = self.path.startswith("/api/models/"), "owner/recurrent" in self.path
        body = (
            json.dumps({"id": "owner/recurrent", "sha": "a" * 40} if is_api else RECURRENT).encode() if known else b"{}"
        )
        self.send_response(200 if known else 404)
        headers = {"X-Repo-Commit": "a" * 40, "ETag": '"b"', "Content-Length": str(len(body))}
        if not known:
            headers["X-Error-Code"] = "RepoNotFound"
        for name, value in {**headers, "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(True)

    def do_HEAD(self) -> None:
        self.answer(False)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "owner/recurrent",
            "model_type qwen2: a model with linear-attention or state-space layers is not available yet",
        ),
        ("owner/nothing", "the hub has no such model, or only for others"),
        ("unreachable", "the hub cannot be reached"),
    ],
)
def test_the_start_of_a_run_asks_the_hub(folder: Path, hub: str, model: str, message: str) -> None:
    """One line on what is done, one on what is wrong, before anything is started."""
    found(folder, DENSE, pretrain="owner/model" if model == "unreachable" else model)
    environment = {
        key: value for key, value in os.environ.items() if "OFFLINE" not in key and "proxy" not in key.lower()
    }
    environment |= {
        "HF_HOME": str(folder / "home"),
        "HF_ENDPOINT": "http://127.0.0.1:9" if model == "unreachable" else hub,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "roll.cli", "run", "run.yaml"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.startswith("looking for ") and "Traceback" not in done.stderr
    assert time.monotonic() - began < 60


def test_a_tracker_without_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from roll import preflight

    monkeypatch.setattr(preflight, "is_installed", lambda module: module != "swanlab")
    found(folder, DENSE, track_with=["stdout", "swanlab"])
    loaded: Any = load_config(None, folder / "run.yaml")
    with pytest.raises(ConfigError, match=r"track_with = 'swanlab': needs a package .*pip install swanlab"):
        preflight.require_trackers(loaded)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", None),
        ("Qwen/Qwen3.5-9B", None),
        ("Qwen/Qwen3.5-0.8B", None),
        ("Qwen/Qwen3.5-35B-A3B", None),
        ("zai-org/GLM-4.1V-9B-Thinking", "a vision-language model of another family"),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "a model that hears or speaks"),
        ("tiiuae/Falcon-H1-1.5B-Instruct", "linear-attention or state-space layers"),
        ("google/flan-t5-large", "an encoder-decoder model"),
        ("Qwen/Qwen2.5-7B-Instruct", None),
    ],
)
def test_a_hub_name_says_what_its_config_would(folder: Path, name: str, rule: str | None) -> None:
    """Of models that are not on this machine."""
    problems = found(folder, {}, pretrain=name)
    assert [problem.key for problem in problems] == (["pretrain"] if rule else [])
    assert rule is None or rule in problems[0].rule


def test_a_hub_name_that_says_nothing_is_noted(folder: Path) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(changed({"pretrain": "somebody/novelty-3b"}, GOOD)))
    (note,) = {n.text for n in load_config(None, folder / "run.yaml").warnings if n.key == "pretrain"}
    assert "cannot be checked without its config.json" in note


def test_flash_attention_without_its_package_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(DENSE))
    key = "actor_train.model_args.attn_implementation"
    (folder / "run.yaml").write_text(yaml.safe_dump(changed({"pretrain": "./model", key: "fa2"}, GOOD)))
    monkeypatch.setattr("roll.config.model_files.is_installed", lambda module: False)
    (note,) = [n.text for n in load_config(None, folder / "run.yaml").warnings if n.key == key]
    assert "sdpa" in note
