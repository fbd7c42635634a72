"""A real HTTP server in a thread, which does what the test tells it, request by request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """Behaviour of the server on one request."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None  # sent instead of `body` as JSON
    stall: bool = False  # say nothing until the server ends
    hang_up: bool = False  # close the connection in the middle of the answer


def completion(text: str, **choice: Any) -> Answer:
    """A chat completion with one choice."""
    message = {"role": "assistant", "content": text}
    return Answer({"object": "chat.completion", "choices": [{"index": 0, "message": message, **choice}]})


@dataclass
class Service:
    """``answer`` is asked for every request, with its number from 0 and its body."""

    answer: Callable[[int, Any], Answer]
    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, body: Any, headers: Mapping[str, str], path: str) -> Answer:
        with self.lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(headers)
            self.paths.append(path)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            return self.answer(number, body)
        finally:
            with self.lock:
                self.running -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.service.take(body, dict(self.headers), self.path)
        if answer.stall:
            self.service.over.wait(30)
            return
        content = answer.raw if answer.raw is not None else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if answer.hang_up else content)
        self.close_connection = answer.hang_up

    def log_message(self, *args: Any) -> None:
        """Quiet."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that lost its patience has closed the connection."""


@contextmanager
def serving(answer: Callable[[int, Any], Answer]) -> Iterator[Service]:
    """A server on a free port of this host, for the length of the block."""
    service = Service(answer)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"service": service}))
    service.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def in_turn(*answers: Answer) -> Callable[[int, Any], Answer]:
    """The answers one after the other; the last one for ever."""
    return lambda number, body: answers[min(number, len(answers) - 1)]
