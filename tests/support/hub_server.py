"""The part of the Hugging Face hub's HTTP API that an upload uses, on this host."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Keeps what is uploaded with the right token."""

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.repositories: dict[str, dict[str, Any]] = {}
        """Name to the body of its creation."""
        self.files: dict[str, dict[str, bytes]] = {}
        """Name of a repository to its files."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            body = json.loads(content)
            name = f"{body.get('organization', 'me')}/{body['name']}"
            status = 409 if name in self.server.repositories else 200
            self.server.repositories.setdefault(name, body)
            self._answer(status, {"url": f"{self.server.url}/{name}", "name": name})
        elif "/preupload/" in self.path:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(content)["files"]
            ]
            self._answer(200, {"files": files})
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            kept = self.server.files.setdefault(name, {})
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    kept[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                200, {"commitUrl": f"{self.server.url}/{name}/commit/0", "commitOid": "0" * 40, "success": True}
            )
        else:
            self._answer(404, {"error": f"no {self.path} here"})

    def do_GET(self) -> None:
        self._answer(404, {"error": f"no {self.path} here"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def hub(token: str) -> Iterator[Hub]:
    server = Hub(token)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
