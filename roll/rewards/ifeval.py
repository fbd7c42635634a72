"""The IFEval reward: the share of a prompt's instructions that a response follows, strictly or loosely."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from roll.config.installation import install_command
from roll.config.reading.errors import did_you_mean
from roll.rewards.answers import after_thought
from roll.rewards.base import RewardOptionError, RewardResult, RewardRule, RewardSample, failure, read_json
from roll.rewards.ifeval_instructions import CHECKS, FUNCTIONS

MAX_LENGTH = 200_000  # characters that are looked at; no instruction needs more
Instruction = tuple[str, dict[str, Any]]
RULES = {**CHECKS, **FUNCTIONS}  # IFEval's by the instruction's id, RLVR-IFeval's by the function's name


@dataclass
class IFEval(RewardRule):
    """1 where all instructions of the prompt are followed, else 0; with ``partial`` the share that is.

    The instructions come from the columns ``instruction_id_list`` and ``kwargs`` as IFEval publishes them, or from the
    ground truth: a mapping (or its JSON) with those two, or with ``func_name`` and its arguments as in RLVR-IFeval,
    whose functions have rules of their own.
    """

    numbers: ClassVar[tuple[str, ...]] = ("strict", "loose", "instructions_strict", "instructions_loose")
    client_options: ClassVar[tuple[str, ...]] = ("*",)
    mode: Literal["strict", "loose"] = "strict"
    """``loose``: an instruction also counts as followed if it is without markdown stars, or without the first line (an
    introduction), the last (a farewell), or both."""
    partial: bool = False  # score the share of the instructions
    score: float = 1.0  # score of a response that follows all

    def __post_init__(self) -> None:
        if importlib.util.find_spec("langdetect") is None:
            raise RewardOptionError(
                f"ifeval tells languages with langdetect, which is missing: {install_command('ifeval')}"
            )

    def judge(self, sample: RewardSample) -> RewardResult:
        text = (after_thought(sample.response, sample.prompt) or "")[:MAX_LENGTH].strip()
        try:
            instructions = read_instructions(sample)
            strict = [follows(text, *instruction) for instruction in instructions]
            variants = list(loosened(text))
            loose = [
                followed or any(follows(variant, *instruction) for variant in variants)
                for followed, instruction in zip(strict, instructions, strict=True)
            ]
        except (TypeError, ValueError) as error:  # of the row: arguments that a check cannot use
            return failure(f"ifeval: {error}")
        verdicts = strict if self.mode == "strict" else loose
        value = sum(verdicts) / len(verdicts) if self.partial else float(all(verdicts))
        shares = sum(strict) / len(strict), sum(loose) / len(loose)
        metrics = zip(self.numbers, (float(all(strict)), float(all(loose)), *shares), strict=True)
        return RewardResult(self.score * value, dict(metrics))


def follows(text: str, identity: str, arguments: Mapping[str, Any]) -> bool:
    """An empty text follows nothing."""
    return bool(text.strip()) and RULES[identity](text, **arguments)


def loosened(text: str) -> Iterator[str]:
    """The text's variants of the loose criterion (IFEval, section 2.2), besides the text itself."""
    lines = text.split("\n")
    pieces = (lines, lines[1:], lines[:-1], lines[1:-1])
    for number, piece in enumerate("\n".join(part).strip() for part in pieces):
        if number:
            yield piece
        yield piece.replace("*", "")


def read_instructions(sample: RewardSample) -> list[Instruction]:
    """Types and arguments of a row's instructions, without null ones: published rows carry those of other types. Raises
    ``ValueError``: there are none, no such type, or an argument that it lacks."""
    source = sample.row if sample.row.get("instruction_id_list") is not None else as_mapping(sample.ground_truth)
    if "func_name" in source:
        found = [(source["func_name"], source)]
    else:
        identities, arguments = source.get("instruction_id_list"), source.get("kwargs")
        identities = json.loads(identities) if isinstance(identities, str) else identities
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if identities is None or not len(identities):
            raise ValueError("the row has no instruction_id_list, and its ground_truth names no instruction")
        arguments = [{}] * len(identities) if arguments is None else arguments
        if len(arguments) != len(identities):
            raise ValueError(f"{len(identities)} instructions but {len(arguments)} kwargs")
        found = list(zip(identities, map(as_mapping, arguments), strict=True))
    checked = []
    for identity, given in found:
        if identity not in RULES:
            hint = did_you_mean(str(identity), RULES, "; did you mean {!r}?")
            raise ValueError(f"no such instruction: {identity!r}{hint}")
        parameters = list(inspect.signature(RULES[identity]).parameters.values())[1:]
        missing = [p.name for p in parameters if p.default is p.empty and given.get(p.name) is None]
        if missing:
            raise ValueError(f"{identity}: kwargs lack {missing[0]!r}")
        checked.append((identity, {p.name: given[p.name] for p in parameters if given.get(p.name) is not None}))
    return checked


def as_mapping(value: object) -> dict[str, Any]:
    """A mapping, or one written as JSON; anything else is empty."""
    value = read_json(value)
    return dict(value) if isinstance(value, Mapping) else {}
