"""Tenants of one service: what one does costs the others nothing, and a killed service goes on from a checkpoint."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from roll.training_service import adapters
from roll.training_service.command import start
from tests.training_service.batches import data, sequences
from tests.training_service.conftest import MAX_LENGTH, NAME

tinker = pytest.importorskip("tinker", reason="needs the SDK: pip install tinker")
types = tinker.types
Connect = Callable[..., Any]
STEPS, TENANTS = 2, 8
RANKS = (2, 4, 8, 1, 16, 3, 32, 5)
LOSSES = ("cross_entropy", "importance_sampling", "ppo")
SCHEDULES = (lambda step: 0.01, lambda step: 0.02 / (step + 1), lambda step: 0.005 * (step + 1))


class Run:
    """A tenant's training, a step at a time, and every number that it sees."""

    def __init__(self, service: Any, tenant: int) -> None:
        self._tenant, self.seen = tenant, []
        self._client = service.create_lora_training_client(NAME, rank=RANKS[tenant], seed=tenant).result()

    def step(self) -> None:
        loss, rate = LOSSES[self._tenant % 3], SCHEDULES[self._tenant % 3](len(self.seen)) * (1 + self._tenant / 16)
        passed = self._client.forward_backward(data(loss), loss)
        stepped = self._client.optim_step(types.AdamParams(learning_rate=rate))
        sampler = self._client.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(sequences(1)[0].tolist())
        samples = sampler.sample(prompt, 4, types.SamplingParams(max_tokens=6, seed=self._tenant)).result().sequences
        outputs = [one["logprobs"].data for one in passed.result().loss_fn_outputs]
        metrics = [passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]]
        self.seen.append(
            [[list(map(float, own)) for own in outputs], metrics, [(s.tokens, s.logprobs) for s in samples]]
        )


def test_tenants_get_what_they_get_alone(connect: Connect) -> None:
    """Bit for bit: ranks, losses and samples of three that take turns, against each alone."""
    alone = []
    for tenant in range(3):
        run = Run(connect(), tenant)
        for _ in range(STEPS):
            run.step()
        alone.append(run.seen)
    together = [Run(connect(), tenant) for tenant in range(3)]
    for _ in range(STEPS):
        for run in together:
            run.step()
    assert [run.seen for run in together] == alone
    assert alone[0] != alone[1]


VANISHING = """
import sys, tinker
from tests.training_service.batches import data
client = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-any").create_lora_training_client(sys.argv[2], rank=4)
client = client.result()
sent = [client.forward_backward(data("cross_entropy", 8), "cross_entropy") for _ in range(20)]
sent[0].result()
print("sent", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_tenants_at_the_same_time_get_what_they_get_alone(
    options: Callable[..., Any], tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight, bit for bit, their passes cut into slices, beside one with losses that are not finite and one whose
    process is killed with requests on their way."""
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(adapters, "MICRO_BATCH_TOKENS", 16)

    def trained(tenant: int) -> list[Any]:
        service = connect(server.url)
        run = Run(service, tenant)
        for _ in range(STEPS):
            run.step()
        service.close("success")
        return run.seen

    def poisoned() -> None:
        bad.forward_backward([poison()], "cross_entropy")
        with pytest.raises(tinker.RequestFailedError, match="norm of the gradient is nan"):
            bad.optim_step(types.AdamParams()).result()

    server = start(options(tmp_path, max_models=TENANTS + 2))
    try:
        alone = [trained(tenant) for tenant in range(TENANTS)]
        bad = connect(server.url).create_lora_training_client(NAME, rank=2).result()
        command = [sys.executable, "-c", VANISHING, server.url, NAME]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as vanishing,
            ThreadPoolExecutor(TENANTS + 1) as threads,
        ):
            assert vanishing.stdout is not None and vanishing.stdout.readline() == b"sent\n"
            together = threads.map(trained, range(TENANTS))
            refused = threads.submit(lambda: [poisoned() for _ in range(STEPS)])
            vanishing.kill()
            assert list(together) == alone
            refused.result()
    finally:
        server.close()


def poison() -> Any:
    """A datum whose loss is not finite."""
    datum = data("cross_entropy")[0]
    weights = datum.loss_fn_inputs["weights"].to_torch() * float("nan")
    return types.Datum(model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, "weights": weights})


def test_a_loss_that_is_not_finite_costs_its_own_tenant_a_step(connect: Connect) -> None:
    good, bad = Run(connect(), 1), connect().create_lora_training_client(NAME, rank=2, seed=0).result()
    before = bad.forward(data("cross_entropy"), "cross_entropy").result().metrics
    bad.forward_backward([poison()], "cross_entropy")
    stepped = bad.optim_step(types.AdamParams())
    good.step()
    with pytest.raises(tinker.RequestFailedError, match="norm of the gradient is nan"):
        stepped.result()
    assert bad.forward(data("cross_entropy"), "cross_entropy").result().metrics == before
    alone = Run(connect(), 1)
    alone.step()
    assert good.seen == alone.seen


@pytest.fixture
def http(service: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"{service}/api/v1", timeout=30, trust_env=False) as client:
        yield client


def test_a_request_that_is_sent_again_is_computed_once(http: httpx2.Client) -> None:
    session = http.post("/create_session", json={"tags": [], "sdk_version": "0"}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 2, "seed": 1}}
    first, second = (http.post("/create_model", json=body).json()["request_id"] for _ in range(2))
    assert first == second
    model = http.post("/retrieve_future", json={"request_id": first}).json()["model_id"]
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    requests = [http.post("/optim_step", json=step).json()["request_id"] for _ in range(2)]
    assert requests[0] == requests[1]
    answers = [http.post("/retrieve_future", json={"request_id": requests[0]}).json() for _ in range(2)]
    assert answers[0] == answers[1] and answers[0]["category"] == "user"
    # Number 3 arrives before number 2, and waits for it.
    late = http.post("/save_weights", json={"model_id": model, "seq_id": 3, "path": "late"}).json()["request_id"]
    early = http.post("/save_weights", json={"model_id": model, "seq_id": 2, "path": "early"}).json()["request_id"]
    paths = [http.post("/retrieve_future", json={"request_id": one}).json()["path"] for one in (early, late)]
    listed = http.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [one["tinker_path"] for one in sorted(listed, key=lambda one: one["time"])] == paths


OPTIM: dict[str, Any] = {"model_id": "none", "seq_id": 1, "adam_params": {}}
PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/create_model", {"session_id": "none", "model_seq_id": 0, "base_model": NAME}, 400, "lora_config is missing"),
        ("/optim_step", OPTIM, 404, "no model none"),
        ("/optim_step", OPTIM | {"adam_params": {"lr": 1}}, 400, "adam_params.lr is not served"),
        ("/optim_step", OPTIM | {"adam_params": {"learning_rate": 10**400}}, 400, "learning_rate"),
        ("/optim_step", OPTIM | {"seq_id": "1"}, 400, "seq_id: '1' must be of type int"),
        ("/weights_info", {"tinker_path": "tinker://../weights/x"}, 400, "must be of letters"),
        ("/weights_info", {"tinker_path": "tinker://a/weights/../../b"}, 400, "must be tinker://RUN/KIND/NAME"),
        ("/retrieve_future", {"request_id": "none"}, 404, "no request none"),
        ("/copy_weights", {}, 404, "copy_weights is not served"),
        ("/create_custom_loss", {}, 404, "create_custom_loss is not served"),
    ],
)
def test_bodies_that_are_refused(path: str, body: Any, status: int, message: str, http: httpx2.Client) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_passes_that_are_no_passes(http: httpx2.Client) -> None:
    zstd = PROTOBUF | {"content-encoding": "zstd"}
    for content, headers, status in (
        (b"{}", {"content-type": "application/json"}, 415),
        (b"\xff" * 64, PROTOBUF, 400),
        (b"no zstd", zstd, 400),
    ):
        assert http.post("/forward_backward", content=content, headers=headers).status_code == status


def test_a_body_that_is_small_until_it_is_decompressed(http: httpx2.Client) -> None:
    import pyarrow

    from roll.training_service.wire import MAX_DECODED

    bomb = pyarrow.compress(b"\0" * (MAX_DECODED + 1), "zstd", asbytes=True)
    assert len(bomb) < 1 << 20
    headers = PROTOBUF | {"content-encoding": "zstd"}
    assert http.post("/forward_backward", content=bomb, headers=headers).status_code == 413


@pytest.mark.parametrize(("count", "columns", "rule"), [(64, 1 << 22, "bytes when they are dense"), (1, 2048, "1024]")])
def test_a_tensor_that_is_small_while_it_is_sparse(count: int, columns: int, rule: str) -> None:
    from roll.training_service.adapters import check_datum, loss_of
    from roll.training_service.wire import messages, read_pass

    message = messages()["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(count):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([1], np.int32).tobytes()
        for key, dtype in (("target_tokens", 2), ("weights", 1)):
            tensor = datum.loss_fn_inputs.add(key=key).value
            tensor.dtype, tensor.sparse_csr.crow_indices = dtype, np.zeros(2, np.int64).tobytes()
            tensor.shape.extend([1, columns])
    body = message.SerializeToString()
    assert len(body) < 1 << 14
    found = read_pass(body)
    with pytest.raises(ValueError, match=re.escape(rule)):
        if found.problem is not None:
            raise ValueError(found.problem)
        check_datum(loss_of("cross_entropy", {}), "cross_entropy", found.data[0], "data[0]", 8, 8)


@pytest.mark.long
def test_the_key_and_models_of_a_session_that_has_ended(
    options: Callable[..., Any], tmp_path: Path, connect: Connect
) -> None:
    """They make room."""
    server = start(options(tmp_path, max_models=1, api_key="tml-right"))
    try:
        with pytest.raises(tinker.AuthenticationError):
            connect(server.url, "tml-wrong").get_server_capabilities()
        clients = [tinker.ServiceClient(base_url=server.url, api_key="tml-right") for _ in range(2)]
        assert clients[0].get_server_capabilities().supported_models[0].model_name == NAME
        clients[0].create_lora_training_client(NAME, rank=2).result()
        with pytest.raises(tinker.BadRequestError, match="1 models are loaded, which is the most"):
            clients[1].create_lora_training_client(NAME, rank=2).result()
        clients[0].close("success")
        clients[1].create_lora_training_client(NAME, rank=2).result()
        clients[1].close("success")
    finally:
        server.close()


@contextmanager
def process(base: Path, output: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command itself, and its address."""
    words = [str(base), "--model-name", NAME, "--dtype", "fp32", "--max-length", str(MAX_LENGTH), "--port", "0"]
    command = [sys.executable, "-m", "roll.cli", "serve-training", *words, "--output", str(output)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            line = next(line for line in running.stderr if "base_url=" in line)
            yield running, line.rpartition("base_url=")[2].strip()
        finally:
            running.kill()


@pytest.mark.long
def test_a_killed_service_goes_on_from_a_checkpoint(base_folder: Path, tmp_path: Path, connect: Connect) -> None:
    """The losses after the kill are those, bit for bit, of a run that nobody killed."""

    def step(client: Any) -> list[float]:
        passed = client.forward_backward(data("ppo"), "ppo")
        stepped = client.optim_step(types.AdamParams(learning_rate=0.01))
        return [passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]]

    whole = connect().create_lora_training_client(NAME, rank=4, seed=3).result()
    expected = [step(whole) for _ in range(4)]
    with process(base_folder, tmp_path) as (running, url):
        first = tinker.ServiceClient(base_url=url, api_key="tml-any")
        trained = first.create_lora_training_client(NAME, rank=4, seed=3).result()
        found = [step(trained) for _ in range(2)]
        path = trained.save_state("two").result().path
        step(trained)
        running.send_signal(signal.SIGKILL)
        running.wait()
        first.holder.close()  # the session's heartbeat, for which nobody is left
    with process(base_folder, tmp_path) as (_, url):
        service = tinker.ServiceClient(base_url=url, api_key="tml-any")
        client = service.create_training_client_from_state_with_optimizer(path).result()
        found += [step(client) for _ in range(2)]
        runs = json.load(urllib.request.urlopen(f"{url}/api/v1/training_runs"))["training_runs"]
        assert len(runs) == 2
        service.close("success")
    assert found == expected
