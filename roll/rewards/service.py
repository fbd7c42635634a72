"""``python -m roll.rewards.service REWARD``: a reward as a service of its own, for ``http_reward``."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from roll.rewards.base import GuardedReward, RewardOptionError, RewardSample, finite_number
from roll.rewards.http_reward import LOOPBACK
from roll.rewards.registry import build_reward, load_target, resolve_name
from roll.serving.http import BadRequest, HttpServer, answered, check_key, read_bytes

logger = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20  # bytes of a request
MAX_SAMPLES = 4096
MAX_SHOWN = 1000
TOKEN_VARIABLE = "ROLL_REWARD_TOKEN"

MAX_OPTIONS = {"timeout": 600.0, "case_timeout": 600.0, "memory_mb": 8192, "output_mb": 256, "processes": 256}
"""Upper limits of a client's options, unless the service itself is configured with more."""


class RewardPool:
    """Holds up to ``instances`` instances of a reward, each built when it is first needed, and decides on the options
    that clients may choose.

    Args:
        reward: a short name or a dotted path, as ``worker_cls``.
        instances: most at a time; further requests wait.
        own: the service's own options.
        allowed: names that clients may set, ``*`` for all; None: the rule's ``client_options``.

    Raises:
        RewardOptionError: options that the reward does not have or cannot use.
    """

    def __init__(
        self,
        reward: str,
        instances: int = 1,
        own: Mapping[str, Any] | None = None,
        allowed: Sequence[str] | None = None,
    ) -> None:
        self._reward = reward
        self._own = dict(own or {})
        if allowed is None:
            target = load_target(resolve_name(reward))
            # A class opens no options to clients by what it inherits.
            allowed = target.__dict__.get("client_options", ()) if isinstance(target, type) else ()
        self._allowed = tuple(allowed)
        # Also a test of the service's own options, at its start.
        self._model = build_reward(reward, self._own)
        self._model.close()
        self.threads = ThreadPoolExecutor(instances, thread_name_prefix="reward")
        """Runs :meth:`score`: as many requests at a time as there are instances."""
        self._instances = instances
        self._lock = threading.Lock()
        self._idle: list[tuple[str, GuardedReward]] = []  # the longest unused first, each after its options as JSON

    def merged(self, options: object) -> dict[str, Any]:
        """The service's options with those of a request. Raises ``RewardOptionError``: an option that is not for
        clients to choose."""
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
            if name in MAX_OPTIONS:
                limit, number = max(finite_number(own) or 0.0, MAX_OPTIONS[name]), finite_number(value)
                if number is None or number > limit:
                    raise RewardOptionError(f"options: {name} = {value!r}: at most {limit:g} is granted")
        return {**self._own, **options}

    def score(self, content: bytes) -> list[dict[str, Any]]:
        """The results of a request, as they are sent back. Raises ``RewardOptionError, KeyError, TypeError, ValueError,
        AttributeError, RecursionError``: a request that cannot be understood."""
        body = json.loads(content)
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
        options = self.merged(body.get("options") or {})
        key = json.dumps(options, sort_keys=True)
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
        """Wait for the requests that are being scored, and close every instance."""
        self.threads.shutdown(cancel_futures=True)
        for _, reward in self._idle:
            reward.close()
        self._idle.clear()


def make_app(pool: RewardPool, api_key: str = "") -> Starlette:
    """The application that scores requests to ``/score`` with a pool; ``api_key``: of its clients, empty for none."""

    async def score(request: Request, _: None) -> Response:
        content = await read_bytes(request, MAX_BODY)
        try:
            results = await asyncio.get_running_loop().run_in_executor(pool.threads, pool.score, content)
        except (RewardOptionError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise BadRequest(f"{type(error).__name__}: {error}"[:MAX_SHOWN]) from error
        # Not JSONResponse, which fails for all samples where a metric of one is NaN.
        return Response(json.dumps({"results": results}), media_type="application/json")

    admit = partial(check_key, expected=api_key, of="the token")
    return Starlette(routes=[Route("/score", answered(score, admit), methods=["POST"])])


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
        pool = RewardPool(options.reward, max(1, options.instances), own, allowed)
        GuardedReward(options.reward, build_reward(options.reward, own)).check_host()
    except (RewardOptionError, ValueError) as error:
        parser.error(f"--options {options.options}: {error}")
    server = HttpServer(options.host, options.port)
    server.start(lambda: make_app(pool, "" if options.without_token else token))
    logger.info("%s scores responses at %s/score", options.reward, server.url)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    server.close()
    pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
