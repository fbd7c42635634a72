"""``python -m roll.rewards.service REWARD``: a reward as a service of its own, which ``http_reward`` can ask.

The standard library's server is enough: a request is little work here and much in the reward.
"""

from __future__ import annotations

import argparse
import hmac
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from roll.rewards.base import RewardOptionError, RewardResult, RewardSample
from roll.rewards.guard import GuardedReward
from roll.rewards.registry import build_reward

logger = logging.getLogger(__name__)

LARGEST_BODY = 64 * 2**20
"""Bytes of a request."""


class RewardPool:
    """As many instances of a reward as may work at a time, made when they are first needed.

    Args:
        reward: a short name or a dotted path, as ``worker_cls``.
        instances: most at a time; further requests wait.
    """

    def __init__(self, reward: str, instances: int) -> None:
        self._reward = reward
        self._free = threading.Semaphore(instances)
        self._instances = instances
        self._lock = threading.Lock()
        self._idle: list[tuple[str, GuardedReward]] = []
        """The longest unused first, each behind its options as JSON."""

    def score(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The results of a request, as they are sent back.

        Raises:
            RewardOptionError, KeyError, TypeError: a request that cannot be understood.
        """
        samples = [read_sample(sample) for sample in body["samples"]]
        with self._instance(body.get("options") or {}) as reward:
            return [shown(result) for result in reward(samples)]

    @contextmanager
    def _instance(self, options: Mapping[str, Any]) -> Iterator[GuardedReward]:
        key = json.dumps(options, sort_keys=True)
        with self._free:
            reward = self._take(key) or GuardedReward(self._reward, build_reward(self._reward, options))
            try:
                yield reward
            finally:
                with self._lock:
                    self._idle.append((key, reward))
                    surplus = self._idle[: -self._instances]
                    del self._idle[: -self._instances]
                for _, old in surplus:
                    old.close()

    def _take(self, key: str) -> GuardedReward | None:
        with self._lock:
            for index in reversed(range(len(self._idle))):
                if self._idle[index][0] == key:
                    return self._idle.pop(index)[1]
        return None

    def close(self) -> None:
        with self._lock:
            for _, reward in self._idle:
                reward.close()
            self._idle.clear()


def read_sample(sample: Mapping[str, Any]) -> RewardSample:
    return RewardSample(
        prompt=str(sample.get("prompt", "")),
        response=str(sample["response"]),
        ground_truth=sample.get("ground_truth"),
        finish_reason=str(sample.get("finish_reason", "stop")),
        row=dict(sample.get("row") or {}),
    )


def shown(result: RewardResult) -> dict[str, Any]:
    if result.score is None:
        return {"error": result.error}
    return {"score": result.score, "metrics": result.metrics}


class RewardServer(ThreadingHTTPServer):
    """Answers ``POST`` to any path, a thread a request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, pool: RewardPool, host: str, port: int, api_key: str = "") -> None:
        super().__init__((host, port), _Handler)
        self.pool = pool
        self.api_key = api_key

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/score"


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > LARGEST_BODY:
            self.close_connection = True
            self._reply(413, {"error": f"the request has {length} bytes, at most {LARGEST_BODY} are taken"})
            return
        content = self.rfile.read(length)
        given = self.headers.get("Authorization", "")
        if self.server.api_key and not hmac.compare_digest(given.encode(), f"Bearer {self.server.api_key}".encode()):
            self._reply(401, {"error": "the token is missing or wrong"})
            return
        try:
            self._reply(200, {"results": self.server.pool.score(json.loads(content))})
        except (RewardOptionError, KeyError, TypeError, ValueError, AttributeError) as error:
            self._reply(400, {"error": f"{type(error).__name__}: {error}"})

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """No line a request."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m roll.rewards.service", description=__doc__)
    parser.add_argument("reward", help="short name or dotted path, as worker_cls")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=9000, help="port; 0: a free one (default: %(default)s)")
    cores = os.cpu_count() or 1
    parser.add_argument("--instances", type=int, default=cores, help="requests worked on at a time (default: cores)")
    parser.add_argument("--api-key-env", default="", help="environment variable with the token that clients must send")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.api_key_env and not os.environ.get(options.api_key_env):
        parser.error(f"--api-key-env {options.api_key_env}: no such variable in the environment")
    pool = RewardPool(options.reward, max(1, options.instances))
    server = RewardServer(pool, options.host, options.port, os.environ.get(options.api_key_env, ""))
    # From another thread, since it waits for the loop that the signal has interrupted.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    logger.info("%s scores responses at %s", options.reward, server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        logger.info("stopped")
    finally:
        server.server_close()
        pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
