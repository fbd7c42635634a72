"""A run whose machine is gone goes on elsewhere from object storage, to the last bit.

Two stores that are reached over a network: WebHDFS, whose client comes with fsspec, and S3 where ``s3fs`` and
``moto[server]`` are installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from roll.checkpoint.store import ObjectStore
from roll.distributed.guard import kill_tree
from tests.pipelines.conftest import Run
from tests.support.checkpoints import bucket  # noqa: F401  the fixture
from tests.support.subprocess_runs import Start
from tests.support.tiny_runs import (
    HERE,
    TinyWorld,
    constant_rate,
    load_changed,
    rlvr_settings,
    training_args,
    untimed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

Store = tuple[str, dict[str, Any]]
"""A URL, and the options with which fsspec reaches it."""


class WebHdfs(BaseHTTPRequestHandler):
    """The part of WebHDFS's REST interface that fsspec uses, on a folder. Data goes to a second address, as there."""

    folder: Path

    def answer(self, status: int = 200, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_any(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.folder / unquote(parts.path).removeprefix("/webhdfs/v1/")
        operation = query["op"]
        if operation in ("CREATE", "APPEND") and "data" not in query:
            return self.answer(307, Location=f"http://{self.headers['Host']}{self.path}&data=true")
        if operation in ("GETFILESTATUS", "LISTSTATUS", "OPEN") and not path.exists():
            reason = {"exception": "FileNotFoundException", "message": f"{path} does not exist"}
            return self.answer(404, json.dumps({"RemoteException": reason}).encode())
        body: Any = {"boolean": True}
        match operation:
            case "CREATE" | "APPEND":
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb" if operation == "CREATE" else "ab") as file:
                    file.write(data)
            case "OPEN":
                with path.open("rb") as file:
                    file.seek(int(query["offset"]))
                    return self.answer(200, file.read(int(query["length"])))
            case "GETFILESTATUS":
                body = {"FileStatus": status(path)}
            case "LISTSTATUS":
                body = {"FileStatuses": {"FileStatus": [status(entry) for entry in path.iterdir()]}}
            case "MKDIRS":
                path.mkdir(parents=True, exist_ok=True)
            case "RENAME":
                path.rename(self.folder / query["destination"].lstrip("/"))
            case "DELETE":
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.answer(200, json.dumps(body).encode())

    do_GET = do_PUT = do_POST = do_DELETE = do_any

    def log_message(self, *arguments: Any) -> None:
        """Nothing is written to standard error."""


def status(path: Path) -> dict[str, Any]:
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    return {"pathSuffix": path.name, "type": kind, "length": 0 if path.is_dir() else path.stat().st_size}


@pytest.fixture
def webhdfs(tmp_path: Path) -> Iterator[Store]:
    folder = tmp_path / "hdfs"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (WebHdfs,), {"folder": folder}))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"webhdfs://127.0.0.1:{server.server_port}/runs/one", {"user": "someone"}
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", ["webhdfs", "bucket"])
def test_a_run_whose_folder_is_gone_goes_on_from_the_store(
    request: pytest.FixtureRequest, start: Start, run: Run, world: TinyWorld, tmp_path: Path, kind: str
) -> None:
    """Killed after a checkpoint has been copied; nothing of its machine is left but the configuration."""
    url, options = request.getfixturevalue(kind)
    saved_model = constant_rate(training_args(8, 2)) | {"save_hf_model": True}
    plain = {"max_steps": 5, "save_steps": 2, "eval_steps": 0, "actor_train.training_args": saved_model}
    whole = run(plain, output=tmp_path / "whole")
    stored = plain | {
        "resume_from_checkpoint": True,
        "checkpoint_config": {"output_dir": url, "storage_options": options, "keep_local_file": False},
    }
    slow = {"max_steps": 100, "rewards.digits.worker_cls": f"{HERE}.rewards.slow_digit_share"}
    killed, store = tmp_path / "killed", ObjectStore(url, options)
    load_changed(rlvr_settings(world, killed), stored | slow)
    driver = start(killed / "input" / "config.yaml", killed)
    driver.wait_for(lambda: "checkpoint-2" in store.names())
    kill_tree(driver.process.pid)
    driver.process.communicate(timeout=60)
    shutil.rmtree(killed)
    # Which checkpoints the store holds by now depends on when the signal came.
    newest = max(int(name.removeprefix("checkpoint-")) for name in store.names())

    elsewhere = tmp_path / "elsewhere"
    resumed = run(stored | {"resume_from_checkpoint": f"{url}/checkpoint-2"}, output=elsewhere)
    assert [row["step"] for row in resumed.steps] == [2, 3, 4]
    assert list(map(untimed, resumed.steps)) == [untimed(row) for row in whole.steps if row["step"] >= 2]
    model = Path("model") / "model.safetensors"
    assert (elsewhere / model).read_bytes() == (whole.output / model).read_bytes()
    log = (elsewhere / "logs" / "run.log").read_text()
    assert f"continuing from {elsewhere / 'checkpoints' / 'checkpoint-2'}" in log
    assert {"checkpoint-2", "checkpoint-4"} <= set(store.names())
    assert newest == 2 or f"superseded-checkpoint-{newest}" in store.names()
