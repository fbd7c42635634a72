"""``roll serve`` as a user runs it: a process that answers until it is interrupted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from roll import cli
from roll.config.reading.errors import ConfigError
from roll.pipelines.serve import of_model, served_role
from roll.serving.chat import Chat
from roll.strategies.engines.requests import SamplingParams
from tests.config.good import GOOD, changed, load
from tests.conftest import ROOT


def test_which_role_is_served_and_with_which_weights(tmp_path: Path, served_model: Path) -> None:
    options = {"load_format": "dummy", "max_model_len": None}
    changes: dict[str, Any] = {
        "pretrain": str(served_model),
        "actor_infer.strategy_args.strategy_config": options,
    }
    loaded = load(tmp_path, changed(changes))
    role = served_role(loaded, "actor_infer")
    assert role.model_args.model_name_or_path == str(served_model)
    length = loaded.plan.sequence_length
    assert role.strategy_args.strategy_config == {"load_format": "auto", "max_model_len": length}
    with pytest.raises(ConfigError, match="a role that generates; in this configuration: actor_infer"):
        served_role(loaded, "actor_train")
    judge: dict[str, Any] = {"worker_cls": "llm_judge", "tag_included": ["essay"], "judge_model_type": "inference"}
    judge |= {"device_mapping": [0], "strategy_args": {"strategy_name": "hf_infer"}}
    with_judge = load(tmp_path, changed(changes | {"rewards.essays": judge}))
    assert served_role(with_judge, "judge.essays").model_args.model_name_or_path == str(served_model)
    loaded = load(tmp_path, changed(changes | {"pretrain": str(tmp_path / "nothing")}))
    with pytest.raises(ConfigError, match=r"with a config\.json"):
        served_role(loaded, "actor_infer")


def test_a_token_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(tmp_path, GOOD)
    (file,) = tmp_path.glob("*.yaml")
    assert cli.main(["serve", str(file), "--api-key-env", "NO_SUCH_TOKEN"]) == cli.EXIT_CONFIG
    assert "NO_SUCH_TOKEN" in capsys.readouterr().err
    assert cli.main(["serve", str(file), "--host", "0.0.0.0"]) == cli.EXIT_CONFIG
    assert "--api-key-env" in capsys.readouterr().err


def test_what_is_neither_a_file_nor_a_model(
    tmp_path: Path, served_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load(tmp_path, GOOD)
    (file,) = tmp_path.glob("*.yaml")
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").symlink_to(served_model)
    wrong: dict[str, list[object]] = {
        f"this run's model is {run / 'model'}": [run],
        "must be a model folder (with a config.json), a .gguf file or a hub name": [tmp_path / "gone.gguf"],
        "no such file": [tmp_path / "gone"],
        "As a model of the hub": ["nobody/nothing"],
        "changes a YAML file; this is a model": [served_model, "seed=1"],
        "actor_infer.strategy_args.strategy_name=vllm": [file, "--strategy", "vllm"],
    }
    for said, words in wrong.items():
        assert cli.main(["serve", *map(str, words)]) == cli.EXIT_CONFIG, said
        assert said in " ".join(capsys.readouterr().err.split())
    assert of_model(str(served_model), None).role.strategy_args.strategy_name == "hf_infer", "on a CPU"


@contextmanager
def served(*words: str) -> Iterator[str]:
    """The line in which a server says where it is; it ends by an interrupt, and well."""
    command = [sys.executable, "-m", "roll.cli", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield next(line for line in process.stdout if "is served at" in line)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.e2e
def test_a_model_folder_is_enough(shared_ray: str, served_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's client gets the answer that ``roll chat`` gives."""
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)
    question = "Leo has 3 bags."
    with (
        served(str(served_model)) as said,
        openai.OpenAI(base_url=re.findall(r"http://\S+", said)[0], api_key="none", max_retries=0) as client,
    ):
        (name,) = (model.id for model in client.models.list())
        messages: Any = [{"role": "user", "content": question}]
        done = client.chat.completions.create(model=name, messages=messages, max_tokens=12, temperature=0)
    chat = Chat(str(served_model), None, SamplingParams(12, temperature=0.0))
    assert name == served_model.name and done.choices[0].message.content == "".join(chat.ask(question))


@pytest.mark.long
@pytest.mark.e2e
def test_the_command_answers_until_it_is_interrupted(
    shared_ray: str, served_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)
    monkeypatch.setenv("MY_TOKEN", "sesame")
    changes = {
        "pretrain": str(served_model),
        "output_dir": str(tmp_path),
        "logging_dir": str(tmp_path / "logs"),
        "num_gpus_per_node": 2,
        "actor_train.device_mapping": [0],
        "actor_infer.device_mapping": [0, 1],
        "actor_infer.model_args.dtype": "fp32",
        "actor_train.model_args.dtype": "fp32",
        "actor_infer.strategy_args": {"strategy_name": "hf_infer", "strategy_config": {"max_model_len": 256}},
    }
    load(tmp_path, changed(changes))
    (file,) = tmp_path.glob("*.yaml")
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "seed": 3, "return_token_ids": True, "n": 4}
    with served(str(file), "--api-key-env", "MY_TOKEN", "--model-name", "tiny") as said:
        assert "by 2 engines" in said
        with httpx2.Client(base_url=re.findall(r"http://\S+", said)[0], trust_env=False, timeout=60) as client:
            assert client.post("/completions", json=body).status_code == 401
            client.headers["Authorization"] = "Bearer sesame"
            first, second = (client.post("/completions", json=body).json()["choices"] for _ in range(2))
            refused = client.post("/completions", json=body | {"prompt": [9] * 500})
    assert len(first) == 4 and first == second
    assert refused.status_code == 400 and "must have 1 to 255" in refused.json()["error"]["message"]
