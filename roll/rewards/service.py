"""``python -m roll.rewards.service REWARD``: a reward as a service of its own, which ``http_reward`` can ask.

The standard library's server is enough: a request is little work here and much in the reward.
"""

from __future__ import annotations

import argparse
import hmac
import json
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from roll.rewards.base import GuardedReward, RewardOptionError, RewardSample
from roll.rewards.http_client import LOOPBACK
from roll.rewards.registry import build_reward, load_target, resolve_name

logger = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20
"""Bytes of a request."""
MAX_SAMPLES = 4096
MAX_SHOWN = 1000
SOCKET_SECONDS = 60.0
"""Longest silence of a client in the middle of a request."""
TOKEN_VARIABLE = "ROLL_REWARD_TOKEN"

MAX_OPTIONS = {"timeout": 600.0, "case_timeout": 600.0, "memory_mb": 8192, "output_mb": 256, "processes": 256}
"""Upper limits of a client's options, unless the service itself is configured with more."""


class ClientOptions:
    """Options that clients of a service may choose.

    Args:
        reward: a short name or a dotted path.
        own: the service's own options.
        allowed: names that clients may set, ``*`` for all; None: the rule's ``client_options``.

    Raises:
        RewardOptionError: options that the reward does not have or cannot use.
    """

    def __init__(self, reward: str, own: Mapping[str, Any], allowed: Sequence[str] | None = None) -> None:
        self._own = dict(own)
        if allowed is None:
            target = load_target(resolve_name(reward))
            # A class opens no options to clients by what it inherits.
            allowed = target.__dict__.get("client_options", ()) if isinstance(target, type) else ()
        self._allowed = tuple(allowed)
        # Also a test of the service's own options, at its start.
        self._model = build_reward(reward, self._own)
        self._model.close()

    def merged(self, options: object) -> dict[str, Any]:
        """The service's options with those of a request.

        Raises:
            RewardOptionError: an option that is not for clients to choose.
        """
        if not isinstance(options, Mapping):
            raise RewardOptionError("options: must be an object")
        for name, value in options.items():
            own = getattr(self._model, name, self._own.get(name))
            if value == own:
                continue
            if "*" not in self._allowed and name not in self._allowed:
                raise RewardOptionError(
                    f"options: {name} is set by the service; --options and --client-options change that"
                )
            if name == "require" and not (isinstance(value, list) and set(own or ()) <= set(value)):
                raise RewardOptionError(f"options: require = {value!r}: the service itself requires {own!r}")
            limit = max(as_number(own or 0), MAX_OPTIONS.get(name, math.inf))
            # NaN, for what is no number, is not within any limit.
            if name in MAX_OPTIONS and not as_number(value) <= limit:
                raise RewardOptionError(f"options: {name} = {value!r}: at most {limit:g} is granted")
        return {**self._own, **options}


def as_number(value: Any) -> float:
    """The number that an option means, also as a text; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


class RewardPool:
    """Holds up to ``instances`` instances of a reward, each built when it is first needed.

    Args:
        reward: a short name or a dotted path, as ``worker_cls``.
        instances: most at a time; further requests wait.
        options: what clients may choose; None: what they may by default.
    """

    def __init__(self, reward: str, instances: int, options: ClientOptions | None = None) -> None:
        self._reward = reward
        self._options = options or ClientOptions(reward, {})
        self._free = threading.Semaphore(instances)
        self._instances = instances
        self._lock = threading.Lock()
        self._idle: list[tuple[str, GuardedReward]] = []
        """The longest unused first, each after its options as JSON."""

    def score(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The results of a request, as they are sent back.

        Raises:
            RewardOptionError, KeyError, TypeError, ValueError: a request that cannot be understood.
        """
        if len(body["samples"]) > MAX_SAMPLES:
            raise ValueError(f"samples: at most {MAX_SAMPLES} a request")
        samples = [
            RewardSample(
                prompt=str(sample.get("prompt", "")),
                response=str(sample["response"]),
                ground_truth=sample.get("ground_truth"),
                finish_reason=str(sample.get("finish_reason", "stop")),
                row=dict(sample.get("row") or {}),
            )
            for sample in body["samples"]
        ]
        options = self._options.merged(body.get("options") or {})
        key = json.dumps(options, sort_keys=True)
        with self._free:
            with self._lock:
                # The one that was used last: the others age, and leave first.
                place = next((at for at in reversed(range(len(self._idle))) if self._idle[at][0] == key), None)
                reward = None if place is None else self._idle.pop(place)[1]
            reward = reward or GuardedReward(self._reward, build_reward(self._reward, options))
            try:
                results = reward(samples)
            finally:
                with self._lock:
                    self._idle.append((key, reward))
                    surplus = self._idle[: -self._instances]
                    del self._idle[: -self._instances]
                for _, old in surplus:
                    old.close()
        return [
            {"error": result.error} if result.score is None else {"score": result.score, "metrics": result.metrics}
            for result in results
        ]

    def close(self) -> None:
        with self._lock:
            for _, reward in self._idle:
                reward.close()
            self._idle.clear()


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

    timeout = SOCKET_SECONDS

    def do_POST(self) -> None:
        given = self.headers.get("Authorization", "")
        # Before anything else is read: strangers cost nothing.
        if self.server.api_key and not hmac.compare_digest(given.encode(), f"Bearer {self.server.api_key}".encode()):
            self._reply(401, {"error": "the token is missing or wrong"}, is_last=True)
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._reply(411, {"error": "Content-Length must say how many bytes follow"}, is_last=True)
            return
        # The number of digits first: int() raises for more than 4,300 of them.
        if len(length) > 12 or int(length) > MAX_BODY:
            error = f"the request has {length[:20]} bytes, at most {MAX_BODY} are taken"
            self._reply(413, {"error": error}, is_last=True)
            return
        content = self.rfile.read(int(length))
        try:
            self._reply(200, {"results": self.server.pool.score(json.loads(content))})
        except RecursionError:
            self._reply(400, {"error": "the request is nested too deep"})
        except (RewardOptionError, KeyError, TypeError, ValueError, AttributeError) as error:
            self._reply(400, {"error": f"{type(error).__name__}: {error}"[:MAX_SHOWN]})

    def _reply(self, status: int, body: dict[str, Any], is_last: bool = False) -> None:
        """Send an answer; the last one where the rest of the request stays unread."""
        self.close_connection = self.close_connection or is_last
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """No line a request."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m roll.rewards.service", description=__doc__)
    parser.add_argument("reward", help="short name or dotted path, as worker_cls")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=9000, help="port; 0: a free one (default: %(default)s)")
    cores = os.cpu_count() or 1
    parser.add_argument("--instances", type=int, default=cores, help="requests worked on at a time (default: cores)")
    key = f"environment variable with the token that clients must send (default: {TOKEN_VARIABLE})"
    parser.add_argument("--api-key-env", default=TOKEN_VARIABLE, help=key)
    parser.add_argument("--without-token", action="store_true", help="answer everybody on this host; loopback only")
    parser.add_argument("--options", default="{}", help="the reward's options as a JSON object (default: none)")
    choice = "comma-separated options that clients may choose, * for all (default: those without effect outside)"
    parser.add_argument("--client-options", help=choice)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    token = os.environ.get(options.api_key_env, "")
    if options.without_token and options.host not in LOOPBACK:
        parser.error(
            f"--without-token with --host {options.host}: who reaches this port may run the reward; set a token"
        )
    if not options.without_token and not token:
        remedy = f"export {options.api_key_env}=$(openssl rand -hex 32), here and at the run, or pass --without-token"
        parser.error(f"--api-key-env {options.api_key_env}: no such variable in the environment; {remedy}")
    try:
        own = json.loads(options.options)
        if not isinstance(own, dict):
            raise ValueError("must be a JSON object")
        allowed = None if options.client_options is None else options.client_options.split(",")
        client = ClientOptions(options.reward, own, allowed)
        GuardedReward(options.reward, build_reward(options.reward, own)).check_host()
    except (RewardOptionError, ValueError) as error:
        parser.error(f"--options {options.options}: {error}")
    pool = RewardPool(options.reward, max(1, options.instances), client)
    server = RewardServer(pool, options.host, options.port, "" if options.without_token else token)
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
