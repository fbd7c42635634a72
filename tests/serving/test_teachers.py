"""Teachers behind a URL: over real HTTP, what they say is what the model itself says, at the same places."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.config.reading.errors import ConfigError
from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.config.strategies.engines import RemoteStrategyConfig
from roll.distributed import WorkerContext
from roll.methods.base import Ask
from roll.methods.teachers import check_teachers, probe_ids, service_problems
from roll.models.distributions import Vocabulary, top_tokens
from roll.models.layouts import TopTokens
from roll.protocol import DataProto
from roll.rehearsal.formulas import quick_lines
from roll.strategies.engines.scoring import PromptLogProbs, RemoteScoring, ServiceRefused, listed_tokens
from roll.workers.model import ScoringWorker
from tests.config.good import load, mistakes
from tests.support.tiny_runs import write_untrained

LENGTHS = ((9, 4), (6, 5))  # tokens of a row, and those of its prompt
LIMIT = 300


def teacher_role(url: str, **options: Any) -> WorkerConfig:
    return WorkerConfig(
        name="teacher",
        model_args=ModelArguments(model_name_or_path="unused"),
        strategy_args=StrategyArguments("remote", {"base_url": f"{url}/v1", "max_retries": 0, **options}),
    )


def rows() -> DataProto:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, LIMIT, (2, 9), generator=generator)
    places = torch.arange(9)
    total, prompt = (torch.tensor(column)[:, None] for column in zip(*LENGTHS, strict=True))
    attention = places < total
    response = attention & (places >= prompt)
    response[0, 5] = False  # a token of a tool, say, which does not count
    return DataProto.from_dict({"input_ids": ids * attention, "attention_mask": attention, "response_mask": response})


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "limit", "temperature"), [(5, 2**31 - 1, 1.0), pytest.param(0, LIMIT, 1.7, marks=pytest.mark.long)]
)
def test_columns_are_those_of_the_model_itself(make_serving: Any, count: int, limit: int, temperature: float) -> None:
    """Of a row, and at places where something does not count; another temperature from the whole vocabulary."""
    serving = make_serving(api_key="sesame")
    model, batch = serving.cluster.workers[0].engine._decoder.model, rows()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEACHER_KEY", "sesame")
        role = teacher_role(serving.server.url, api_key_env="TEACHER_KEY")
        worker = ScoringWorker(WorkerContext("teacher", role, 1, 2))
        worker.initialize()
    assert (worker.rank_info.dp_rank, worker.rank_info.dp_size) == (1, 2)
    found = worker.forward(batch, Ask(temperature=temperature, top=TopTokens(count, limit))).batch
    log_probs = worker.forward(batch).batch["log_probs"]
    worker.close()
    mask = batch.batch["response_mask"]
    for row, (length, _) in enumerate(LENGTHS):
        with torch.no_grad():
            logits = model(batch.batch["input_ids"][row : row + 1, :length]).logits[0, :-1].float()
        places = mask[row].nonzero()[:, 0]
        whole, own_rows = Vocabulary(logits.shape[1]), logits[places - 1]
        plain = top_tokens(whole, own_rows.__getitem__, len(places), 64, temperature, TopTokens(count, limit))
        torch.testing.assert_close(found["top_log_probs"][row][places], plain["top_log_probs"], atol=2e-5, rtol=0)
        assert torch.equal(found["top_ids"][row][places][:, :5], plain["top_ids"][:, :5])
        torch.testing.assert_close(
            found["tail_log_prob"][row][places].exp(), plain["tail_log_prob"].exp(), atol=1e-5, rtol=0
        )
        own = logits.log_softmax(-1)[places - 1].gather(1, batch.batch["input_ids"][row][places][:, None])[:, 0]
        torch.testing.assert_close(log_probs[row][places], own, atol=2e-5, rtol=0)
    assert not log_probs[~mask].any() and not found["top_log_probs"][~mask].any()


@pytest.mark.long
def test_a_service_is_looked_at_before_anything_starts(shared: Any, tmp_path: Path, served_model: Path) -> None:
    options = RemoteStrategyConfig(base_url=f"{shared.server.url}/v1")
    assert list(service_problems(options, str(served_model), 5, 100)) == []
    other = tmp_path / "other"
    other.mkdir()
    for file in served_model.iterdir():
        content = file.read_bytes()
        if file.name == "tokenizer.json":
            tree = json.loads(content)
            tree["model"]["vocab"] = {token: (id_ + 7) % 200 for token, id_ in tree["model"]["vocab"].items()}
            content = json.dumps(tree).encode()
        (other / file.name).write_bytes(content)
    (problem,) = service_problems(options, str(other), 5, 100)
    assert "another vocabulary" in problem and "(student " in problem
    (problem,) = service_problems(RemoteStrategyConfig(base_url="http://127.0.0.1:9/v1"), str(served_model), 5, 100)
    assert problem.startswith("does not answer")
    (problem,) = service_problems(options, str(served_model), 1 << 20, 100)
    assert "prompt_logprobs: must be from -1" in problem and "--max-logprobs" in problem
    named = RemoteStrategyConfig(base_url=options.base_url, model="mine")
    (problem,) = service_problems(named, str(served_model), 5, 100)
    assert "lists tiny; strategy_config.model" in problem
    plan: Any = SimpleNamespace(section=teacher_role(shared.server.url, model="mine"), model_path=str(served_model))
    with pytest.raises(ConfigError, match=r"teacher\.strategy_args\.strategy_config\.base_url"):
        check_teachers(str(served_model), {"teacher": ("teacher_pretrain", plan)}, 5, 64, Path("a.yaml"))


@pytest.fixture
def wrong_service() -> Iterator[Any]:
    """A service whose answer to the prompt [1, 2, 3] the test decides about."""

    class Handler(BaseHTTPRequestHandler):
        rows: Any = None

        def answer(self, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.answer({"data": [{"id": "one", "max_model_len": 8}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer({"choices": [{"prompt_logprobs": self.rows}]})

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", Handler
    server.shutdown()
    server.server_close()


def said(token: int, value: float = -1.0) -> dict[str, Any]:
    return {str(token): {"logprob": value, "rank": 1, "decoded_token": "x"}}


def test_answers_that_would_teach_something_else_are_refused(wrong_service: Any) -> None:
    """Positions that are one off, log-probs that are none, too few tokens, and no log-probs at all."""
    url, handler = wrong_service
    teacher = RemoteScoring(teacher_role(url))
    teacher.initialize()
    for answer, words in (
        ([None, said(3), said(2)], "position 1 of prompt_logprobs is not about token 2"),
        ([None, said(2)], "2 positions for a prompt of 3"),
        (None, "has no prompt_logprobs"),
        ([None, said(2), said(3, float("nan"))], "not finite"),
    ):
        handler.rows = answer
        with pytest.raises(ServiceRefused, match=words):
            teacher.scores([[1, 2, 3]], 1)
    handler.rows = [None, said(2), said(3)]
    assert teacher.scores([[1, 2, 3]], 1)[0].log_probs == [-1.0, -1.0]
    teacher.shutdown()
    service = PromptLogProbs(RemoteStrategyConfig(base_url=f"{url}/v1"))
    assert service.model == "one" and service.max_model_len == 8
    service.close()


def test_listed_tokens_and_ids_that_a_service_is_asked_for() -> None:
    """Ids that the student does not know are left out of the list, and their mass is in the rest."""
    asked = probe_ids(1000, [990, 991, 5], 10)
    assert asked[:3] == [5, 990, 991] and len(asked) == 10 and max(asked) < 1000 and len(set(probe_ids(4, [], 10))) == 4
    table = np.log([0.5, 0.3, 0.15, 0.05])
    entries = [(7, table[0]), (1, table[1]), (2, table[2])]
    log_probs, ids, rest = listed_tokens(entries, TopTokens(2, 5), 1.0)
    assert ids.tolist() == [1, 2] and np.exp(log_probs) == pytest.approx([0.3, 0.15])
    assert np.exp(rest) == pytest.approx(0.55)
    with pytest.raises(ValueError, match="2 of 3 most probable tokens have an id below 5"):
        listed_tokens(entries, TopTokens(3, 5), 1.0)


def test_keys(tmp_path: Path, world_settings: dict[str, Any]) -> None:
    def problems(**changes: Any) -> str:
        return " | ".join(map(str, mistakes(tmp_path, world_settings | changes)))

    def teacher(**options: Any) -> dict[str, Any]:
        return {"strategy_args": {"strategy_name": "remote", "strategy_config": options}}

    good = teacher(base_url="http://127.0.0.1:8000/v1")
    assert problems(teacher=good) == "", "no devices, no worker's size"
    sizes = {"student_pretrain": "Qwen/Qwen3-0.6B", "teacher_pretrain": "Qwen/Qwen3-4B"}
    lines = dict(quick_lines(load(tmp_path, world_settings | sizes | {"teacher": good}).plan))
    assert lines.keys() == {"student"}, "what is computed elsewhere takes no memory here"
    assert "is needed: the address of the service" in problems(teacher=teacher())
    assert "must be the service's address" in problems(teacher=teacher(base_url="ftp://x"))
    assert "no such variable" in problems(teacher=teacher(base_url="http://x/v1", api_key_env="NO_SUCH_KEY"))
    assert "logits_topk 0 (the whole vocabulary)" in problems(teacher=good, kd_temperature=2.0)
    assert problems(teacher=good, kd_temperature=2.0, logits_topk=0) == ""
    engine = {"strategy_args": {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 2}}}
    assert problems(teacher=engine | {"device_mapping": [0, 1]}) == ""
    assert "vllm" in problems(teacher=engine | {"device_mapping": [0, 1]}, kd_temperature=2.0)


@pytest.fixture
def world_settings() -> dict[str, Any]:
    return {
        "pipeline": "distill",
        "exp_name": "kd",
        "student_pretrain": "my/student",
        "teacher_pretrain": "my/teacher",
        "student": {
            "data_args": {"file_name": "rows.jsonl"},
            "strategy_args": {"strategy_name": "fsdp2_train"},
            "device_mapping": [0],
        },
    }


@pytest.fixture(scope="module")
def vllm_server(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """vLLM's own HTTP server with a tiny model of two heads of 32, in a process of its own: its address, the folder."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make install-vllm")
    folder = tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny["tiny_model"], "HEADS", 2)
        write_untrained(tiny, folder / "model", num_problems=64)
    with socket.socket() as held:
        # Bound as vLLM binds it, and not listening: nobody else is given the port meanwhile.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        arguments = ["--model", folder / "model", "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port]
        arguments += ["--dtype", "float32", "--max-model-len", 128, "--enforce-eager", "--max-logprobs", -1]
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, arguments)]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
            )
        try:
            while True:  # until it answers or has ended; the suite's own limit is the only one
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                try:
                    assert httpx2.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
                    break
                except httpx2.TransportError:
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}", folder / "model"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.long
@pytest.mark.matrix
def test_vllms_own_server_is_a_teacher(vllm_server: tuple[str, Path]) -> None:
    """Its log-probs are the model's, at the same places, of some tokens and of the whole vocabulary; and it is refused
    where its limits are too small."""
    url, folder = vllm_server
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocabulary = model.config.vocab_size
    options = RemoteStrategyConfig(base_url=f"{url}/v1")
    assert list(service_problems(options, str(folder), 5, 100)) == []
    assert list(service_problems(options, str(folder), 0, 100)) == []
    (problem,) = service_problems(options, str(folder), vocabulary + 1, 100)
    assert "does not give the log-probs of a prompt" in problem and "--max-logprobs" in problem
    (problem,) = service_problems(options, str(folder), 5, 128)
    assert "serves 128 tokens at most" in problem
    worker = ScoringWorker(WorkerContext("teacher", teacher_role(url), 0, 1))
    worker.initialize()
    batch = rows()
    mask = batch.batch["response_mask"]
    with torch.no_grad():
        table = model(batch.batch["input_ids"]).logits.float().log_softmax(-1)
    before = table.roll(1, dims=1)[mask]  # what each token was predicted by
    for count in (5, 0):
        found = worker.forward(batch, Ask(top=TopTokens(count, 2**31 - 1))).batch
        plain = before.topk(count or vocabulary)
        torch.testing.assert_close(found["top_log_probs"][mask], plain.values, atol=2e-5, rtol=0)
        assert torch.equal(found["top_ids"][mask][:, :5], plain.indices[:, :5].int())
        assert float((found["tail_log_prob"][mask].exp() - (1 - plain.values.exp().sum(-1))).abs().max()) < 1e-5
    log_probs = worker.forward(batch).batch["log_probs"]
    worker.close()
    own = before.gather(1, batch.batch["input_ids"][mask][:, None])[:, 0]
    torch.testing.assert_close(log_probs[mask], own, atol=2e-5, rtol=0)
