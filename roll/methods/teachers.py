"""Teachers of all kinds: the section that a worker gets, and its checks before a start.

A teacher is a model under a strategy that computes batches, an engine that only reads (``vllm``), or a service
elsewhere (``remote``). The last two give log-probs at temperature 1, of the most probable tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.model_files import vocabulary_of
from roll.config.plan.plan import RolePlan
from roll.config.plan.planning import with_cache_length
from roll.config.reading.errors import ConfigError, Problem, count
from roll.config.reading.yaml_files import shown
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import own_weights
from roll.config.strategies.engines import RemoteStrategyConfig
from roll.config.strategies.registry import backend_of, typed_strategy_config
from roll.workers import only_scores

if TYPE_CHECKING:
    from roll.config.checks.base import Checks
    from roll.config.loader import LoadedConfig
    from roll.config.pipelines import PipelineDefinition

TEACHER = "teacher"
"""The section and role, the name of a teacher that is the only one, and the beginning of names of its columns."""
# Number of ids whose texts are requested of a service: added tokens first, then ids spread over the vocabulary.
PROBED = 96
UNFINISHED_CHARACTER = "\ufffd"


def is_teacher(role: str) -> bool:
    return role.partition(".")[0] == TEACHER


def finished_teacher(section: WorkerConfig, longest: int) -> WorkerConfig:
    """The section of an engine as its workers get it: with the weights of its folder, and room for sequences of
    ``longest`` tokens and for the token that an engine samples after them."""
    if backend_of(section.strategy_args.strategy_name).generates is None or not only_scores(section):
        return section
    return own_weights(with_cache_length(section, longest + 1))


def started_teachers(pipeline: PipelineDefinition, loaded: LoadedConfig[Any]) -> dict[str, tuple[str, RolePlan]]:
    """The key that names the model, and the plan, of each teacher that a run starts."""
    roles = {name: role for name, role in loaded.plan.roles.items() if is_teacher(name)}
    return {name: (pipeline.model(loaded.config, name, role.section)[0], role) for name, role in roles.items()}


def check_vocabularies_of(pipeline: PipelineDefinition, loaded: LoadedConfig[Any], student: str) -> None:
    """:func:`check_vocabularies` of the role ``student`` and of teachers, as far as they are on this machine."""
    for key, role in started_teachers(pipeline, loaded).values():
        check_vocabularies(str(loaded.plan.roles[student].model_path), str(role.model_path), key, loaded.source)


def check_teachers_of(pipeline: PipelineDefinition, loaded: LoadedConfig[Any], student: str, wanted: int) -> None:
    """:func:`check_teachers` of a run whose role ``student`` learns."""
    if teachers := started_teachers(pipeline, loaded):
        path = str(loaded.plan.roles[student].model_path)
        check_teachers(path, teachers, wanted, loaded.plan.sequence_length, loaded.source)


def check_temperature(
    name: str, section: WorkerConfig, temperature: float, whole: bool, key: str, instead: str, checks: Checks
) -> None:
    """Engines and services give log-probs at temperature 1; another one can be made of the whole vocabulary only.

    Args:
        name: name of the teacher's section.
        whole: the teacher gives its whole vocabulary.
        key: the key of ``temperature``.
        instead: what gives the whole vocabulary.
    """
    if only_scores(section) and temperature != 1.0 and not whole:
        strategy = section.strategy_args.strategy_name
        rule = (
            f"must be 1 with {name} under {strategy}, which gives log-probs at temperature 1{instead}; or compute the "
            "teacher under fsdp2_infer"
        )
        checks.add(key, temperature, rule, 1.0)


def check_teachers(
    student: str, teachers: Mapping[str, tuple[str, RolePlan]], wanted: int, longest: int, source: Path
) -> None:
    """Compare vocabularies, tokenizers of the hub included, and ask every service for what the run will ask it for.

    Args:
        student: the student's model.
        teachers: by section, the key that names the teacher's model, and its plan.
        wanted: number of most probable tokens that the run needs; 0: all; -1: none.
        longest: tokens of the longest row.

    Raises:
        ConfigError: another vocabulary, a service that does not answer, or one that serves another model.
    """
    problems: list[Problem] = []
    for name, (key, plan) in teachers.items():
        check_vocabularies(student, str(plan.model_path), key, source, fetch=True)
        options = typed_strategy_config(plan.section.strategy_args)
        if isinstance(options, RemoteStrategyConfig):
            path = f"{name}.strategy_args.strategy_config.base_url"
            for rule in service_problems(options, student, wanted, longest):
                problems.append(Problem(path, options.base_url, rule, source=shown(source)))
    if problems:
        raise ConfigError(problems)


def service_problems(options: RemoteStrategyConfig, student: str, wanted: int, longest: int) -> Iterator[str]:
    """Reasons why this service cannot be a teacher, found by requests for a few of the student's ids."""
    from transformers import AutoTokenizer

    from roll.strategies.engines.scoring import ALL, PromptLogProbs, ServiceRefused

    tokenizer: Any = AutoTokenizer.from_pretrained(student)
    prompt = probe_ids(len(tokenizer), tokenizer.added_tokens_encoder.values(), min(PROBED, longest))
    try:
        # No waiting for a service that is down: a check reports that; a run in progress retries.
        service = PromptLogProbs(replace(options, max_retries=1))
    except ServiceRefused as error:
        yield f"does not answer: {error}"
        return
    try:
        # As many tokens as the run will request: the limit of a server shows only in a request.
        (rows,) = service.ask([prompt], {0: ALL, -1: 0}.get(wanted, wanted))
    except ServiceRefused as error:
        hint = "" if wanted < 0 else "; vLLM's server needs --max-logprobs with at least as many (-1 for all)"
        yield f"does not give the log-probs of a prompt: {error}{hint}"
        return
    finally:
        service.close()
    if service.max_model_len is not None and service.max_model_len <= longest:
        yield f"serves {service.max_model_len} tokens at most, and rows have up to {longest} and one sampled token"
    differing = []
    # The first token has no log-prob, since nothing precedes it.
    for token, row in zip(prompt[1:], rows[1:], strict=True):
        theirs, own = (row or {})[str(token)].get("decoded_token"), str(tokenizer.decode([token]))
        # Tokens that end inside a UTF-8 character have no text of their own, and decoders differ in what they show.
        if theirs is not None and theirs != own and UNFINISHED_CHARACTER not in theirs + own:
            differing.append((token, own, theirs))
    if differing:
        token, own, theirs = differing[0]
        yield (
            f"serves a model of another vocabulary: {count(len(differing), 'id')} of {len(prompt) - 1} asked differ, "
            f"for instance {token} (student {own!r}, service {theirs!r})"
        )


def probe_ids(size: int, added: Iterable[int], length: int) -> list[int]:
    """Up to ``length`` ids below ``size``: half of them added tokens if there are so many, the others evenly spread."""
    first = sorted(set(added))[: max(1, length // 2)]
    rest = max(1, length - len(first))
    spread = [(place * size) // rest for place in range(rest)]
    return list(dict.fromkeys([*first, *spread]))[:length]


def check_vocabularies(student: str, teacher: str, key: str, source: Path, fetch: bool = False) -> None:
    """Compare the vocabularies of two models.

    Args:
        key: names the teacher's model, for the message.
        source: the configuration's file.
        fetch: also where a tokenizer is not on this machine yet.

    Raises:
        ConfigError: an id that is another token, or is a token on one side only.
    """
    if student == teacher:
        return
    ours, theirs = vocabulary_of(student, fetch), vocabulary_of(teacher, fetch)
    # A tokenizer of the hub that is not here yet is compared later, once it has been fetched.
    if ours is None or theirs is None or ours == theirs:
        return
    differing = sorted(number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number))
    first = differing[0]
    amount = f"{len(differing)} token ids differ" if len(differing) > 1 else "1 token id differs"
    mine, other = (repr(one[first]) if first in one else "has none" for one in (ours, theirs))
    rule = (
        f"has another vocabulary than the student's {student}: {amount}, the first is {first} (student {mine}, teacher "
        f"{other}); distributions are compared id by id, so both need one tokenizer, added tokens included"
    )
    raise ConfigError([Problem(key, teacher, rule, source=shown(source))])
