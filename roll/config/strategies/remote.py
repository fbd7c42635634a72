"""Options of the ``remote`` strategy: a model at a URL, and the addresses of such services."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from roll.config.reading.errors import Problems
from roll.config.reading.fields import setting
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import Backend, StrategyConfig

EXAMPLE_URL = "http://127.0.0.1:8000/v1"


def url_problem(url: str) -> str | None:
    """The problem of an OpenAI-compatible service's ``base_url``; None: there is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "must be the service's address up to and with its version, as http://host:8000/v1"
    return None


@dataclass(frozen=True)
class RemoteStrategyConfig(StrategyConfig):
    """``remote``: a model served elsewhere, asked for ``prompt_logprobs`` by ``POST <base_url>/completions``: vLLM's
    server, ``roll serve``, or any other that answers as they do."""

    base_url: str = ""
    """Address of the service up to and with its version, such as ``http://host:8000/v1``."""
    model: str | None = None
    """Name that the model is served under; null: the only one that ``GET <base_url>/models`` lists."""
    api_key_env: str = ""
    """Environment variable with the token that is sent as ``Authorization: Bearer ...``."""
    concurrency: int = setting(16, ge=1)
    """Requests that one worker has in flight at a time; a request is one sequence."""
    max_retries: int = setting(8, ge=0)
    """Tries beyond the first, with growing pauses: a service may be started again meanwhile."""

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        path = f"{name}.strategy_args.strategy_config"
        wrong = "is needed: the address of the service" if not self.base_url else url_problem(self.base_url)
        if wrong is not None:
            problems.add(f"{path}.base_url", self.base_url or None, wrong, EXAMPLE_URL)
        if self.api_key_env and not os.environ.get(self.api_key_env):
            problems.add(f"{path}.api_key_env", self.api_key_env, "no such variable in the environment")
        if role.device_mapping is not None:
            problems.note(f"{name}.device_mapping", "has no effect: the model is computed elsewhere")


REMOTE = Backend("remote", RemoteStrategyConfig, scores="roll.strategies.remote.RemoteScoring", is_remote=True)
