"""``roll bisect-logprobs CONFIG [key=value ...]``: in which operation a configuration's engine and trainer part."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from roll.config.loader import LoadedConfig, load_config
from roll.preflight import prepared


def main(words: Sequence[str]) -> int:
    """The exit status: 0 if all log-probs are equal to the last bit, 1 if some are not.

    Raises:
        ConfigError: a mistake in the configuration, or a pair that one process cannot compute.
    """
    description = "say where the log-probs of engine and trainer part"
    parser = argparse.ArgumentParser(prog="roll bisect-logprobs", description=description)
    parser.add_argument("config", help="YAML file, also relative to examples/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the configuration")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of the data (default: 4)")
    parser.add_argument("--samples", type=int, default=4, help="responses to each (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a response (default: 64)")
    arguments = parser.parse_intermixed_args(list(words))
    load = partial(load_config, None, arguments.config, None, arguments.overrides)
    loaded: LoadedConfig[Any] = prepared(load, lambda text: None)
    from roll.pipelines.bisect_log_probs import Pair, one_rank, prompts_of, show

    prompts = prompts_of(loaded, arguments.prompts)
    with one_rank():
        pair = Pair(loaded)
        plan: Any = loaded.plan
        return show(pair, prompts, arguments.samples, min(arguments.tokens, plan.max_new_tokens))
