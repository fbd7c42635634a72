"""Models that a run names by their hub name are looked up before anything starts: at once, aloud, in bounded time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from roll.config.checks_model import family_problem, shape_problems
from roll.config.errors import ConfigError, Problem
from roll.config.loader import LoadedConfig
from roll.config.model_files import CONFIG, looks_like_folder, model_folder, read_model_config
from roll.config.sources import shown
from roll.config.strategy import typed_strategy_config

SECONDS = 20.0
"""Most time for one model's ``config.json``, retries included."""
ENDPOINT = "https://huggingface.co"


def find_models(loaded: LoadedConfig[Any], say: Callable[[str], None]) -> bool:
    """Fetch the ``config.json`` of every model that is not on this machine yet, and check it as that of a local one.

    Args:
        say: is given a line before the hub is asked.

    Returns:
        Whether one was fetched: what the plan takes from a model's ``config.json`` is known only now.

    Raises:
        ConfigError: a model that the hub does not have or give, that cannot be reached, or that its role cannot have.
    """
    problems: list[Problem] = []
    answers: dict[str, str | None] = {}
    pipeline = loaded.pipeline
    for name, role in pipeline.models(loaded.config).items():
        key, path = pipeline.model(loaded.config, name, role)
        if path is None or looks_like_folder(path) or (path not in answers and model_folder(path) is not None):
            continue
        if path not in answers:
            say(f"looking for {path} at {os.environ.get('HF_ENDPOINT', ENDPOINT)} ...")
            answers[path] = fetch(path)
        rule = answers[path]
        found = None if rule is not None else read_model_config(path)
        if found is not None:
            rule = family_problem(found, name, role)
            options = typed_strategy_config(role.strategy_args)
            for wrong, value, text, example in shape_problems(pipeline.section_key(name), role, options, found):
                problems.append(Problem(wrong, value, f"{text} ({path})", example, shown(loaded.source)))
        if rule is not None and not any(problem.key == key for problem in problems):
            problems.append(Problem(key, path, rule, source=shown(loaded.source)))
    if problems:
        raise ConfigError(problems)
    return bool(answers)


def fetch(path: str, seconds: float = SECONDS) -> str | None:
    """Bring a model's ``config.json`` into the cache; None: it is there, else why not."""
    answer: Future[str | None] = Future()
    # A thread of its own: looking up a name, or a server that only trickles, keeps to no timeout of the client.
    threading.Thread(target=_answer, args=(path, answer), daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        return f"no answer from the hub within {seconds:g} seconds: give a folder, or set HF_ENDPOINT to a mirror"


def _answer(path: str, answer: Future[str | None]) -> None:
    try:
        answer.set_result(_download(path))
    except BaseException as error:
        answer.set_exception(error)


def _download(path: str) -> str | None:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of the httpx that it was built on
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
    )

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        HfApi().model_info(path, timeout=SECONDS / 2)
        hf_hub_download(path, CONFIG)
    except GatedRepoError:
        return "is gated: accept its terms at the hub, and set HF_TOKEN"
    except RepositoryNotFoundError:
        return "the hub has no such model, or only for others: see the spelling, or set HF_TOKEN"
    except EntryNotFoundError:
        return f"is no model in Hugging Face's format: the hub has no {CONFIG} of it"
    except HFValidationError as error:
        return str(error).splitlines()[0]
    except (HfHubHTTPError, OSError) as error:
        return f"cannot be fetched from the hub ({_reason(error)}): give a folder, or set HF_ENDPOINT to a mirror"
    except HTTPError as error:
        return f"the hub cannot be reached ({_reason(error)}): give a folder, or set HF_ENDPOINT to a mirror"
    return None


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
