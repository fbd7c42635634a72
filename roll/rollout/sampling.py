"""From a role's ``generating_args`` to sampling parameters."""

from __future__ import annotations

from roll.config.roles import GeneratingArguments
from roll.strategies.engines.requests import SamplingParams


def sampling_params(args: GeneratingArguments, max_new_tokens: int) -> SamplingParams:
    """The parameters that training samples with; ``do_sample: false`` means greedy."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=args.min_new_tokens,
        temperature=args.temperature if args.do_sample else 0.0,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=tuple(args.stop_token_ids or ()),
        stop_strings=tuple(args.stop_strings or ()),
        include_stop_str_in_output=args.include_stop_str_in_output,
    )


def greedy(max_new_tokens: int, like: SamplingParams) -> SamplingParams:
    """The most probable continuation, stopping where ``like`` would."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        stop_token_ids=like.stop_token_ids,
        stop_strings=like.stop_strings,
        include_stop_str_in_output=like.include_stop_str_in_output,
    )
