"""The samples of an evaluation on disk: written as prompts are done, resumed where an evaluation was interrupted."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from roll.checkpoint.folders import atomic_file
from roll.config.loader import LoadedConfig
from roll.config.model_files import model_folder
from roll.config.reading.errors import ConfigError
from roll.config.roles import DataArguments
from roll.config.run import PolicyRunConfig
from roll.datasets.types import DataError
from roll.pipelines.evaluate.config import EvaluateConfig, EvaluatePlan, ModelsPlan
from roll.pipelines.files import sample_table
from roll.pipelines.rlvr.accuracy import Answers, merged_votes, voted_answer
from roll.rollout.groups import SampleGroup

logger = logging.getLogger(__name__)

SAMPLES, SETTINGS, RESULTS = "samples.jsonl", "evaluation.json", "results.json"
Record = dict[str, Any]
Place = tuple[str, str]  # model and pass


def settings_of(config: EvaluateConfig, plan: EvaluatePlan) -> dict[str, Any]:
    """Everything that the samples depend on: equal for evaluations of which one may reuse the other's samples."""
    own = {
        "validation": [asdict(one) for one in plan.validation_sets],
        "rewards": {name: asdict(one) for name, one in config.rewards.items()},
        "templates": [config.global_template, config.tag_to_template],
    }
    return shared_settings(config, plan, [one.data_args for one in plan.validation_sets], own)


def shared_settings(
    config: PolicyRunConfig, plan: ModelsPlan, data: Sequence[DataArguments], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of every evaluation with an evaluation's ``own``, as plain JSON values; ``data``: sections whose files
    are read."""
    written = [one.file_name for one in data]
    files = [name for names in written for name in ([names] if isinstance(names, str) else names or ())]
    weights: dict[str, list[Path]] = {}
    for one in plan.models:
        folder = one.checkpoint or model_folder(one.path)
        weights[one.name] = []
        if folder is not None:
            weights[one.name] = [*sorted(folder.rglob("*.safetensors")), *sorted(folder.rglob("trainer_state.json"))]
    shared = {
        "models": {one.name: [one.path, one.base, *map(_state, weights[one.name])] for one in plan.models},
        "data files": {name: _state(Path(name).expanduser()) for name in files},
        "evaluate.num_samples, evaluate.temperatures": [asdict(one) for one in plan.passes],
        "seed": config.seed,
        "actor_infer.strategy_args.strategy_name": config.actor_infer.strategy_args.strategy_name,
        "actor_infer.model_args.dtype": config.actor_infer.model_args.dtype,
    }
    plain: dict[str, Any] = json.loads(json.dumps({**shared, **own}, default=str))
    return plain


def _state(path: Path) -> list[Any]:
    """Size and time of a file, as far as it is on this machine."""
    if not path.is_file():
        return [str(path)]
    found = path.stat()
    return [str(path), found.st_size, found.st_mtime_ns]


def differing(folder: Path, wanted: Mapping[str, Any]) -> list[str] | None:
    """Keys in which the evaluation in ``folder`` has other settings; None: there is none to continue."""
    file = folder / SETTINGS
    if not file.is_file() or not (folder / SAMPLES).is_file():
        return None
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return [SETTINGS]
    return [key for key in wanted if written.get(key) != wanted[key]]


def check_taken_up(loaded: LoadedConfig[Any], settings: Callable[[], dict[str, Any]]) -> None:
    """ConfigError: the samples in the output folder are those of an evaluation with other settings."""
    folder = loaded.plan.output_dir
    if loaded.config.evaluate.resume and (found := differing(folder, settings())):
        rule = (
            f"{folder / SAMPLES} holds samples of an evaluation with other settings ({'; '.join(found)}); "
            "begin anew (the file is kept as .previous), or choose another output_dir"
        )
        raise ConfigError([loaded.problem("evaluate.resume", True, rule, False)])


class SampleFile:
    """``samples.jsonl``: a line a sample. A prompt counts as answered when all of its samples are there."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
        """Open the file for appending; what an interrupted evaluation left of a prompt is removed."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / SAMPLES
        self._groups: dict[Place, dict[int, list[Record]]] = defaultdict(dict)
        if resume and differing(folder, settings) == []:
            records = defaultdict(list)
            for record in read_samples(self.path):
                records[record["model"], record["pass"], record["order"]].append(record)
            whole = {key: group for key, group in records.items() if len(group) == group[0]["of"]}
            for (model, name, order), group in whole.items():
                self._groups[model, name][order] = group
            _write_whole(self.path, "".join(_line(record) for group in whole.values() for record in group))
        elif self.path.exists():
            self.path.replace(self.path.with_name(f"{SAMPLES}.previous"))
        _write_whole(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def answered(self, model: str, name: str) -> set[int]:
        """Numbers of the prompts that a pass has answered."""
        return set(self._groups[model, name])

    def records(self, model: str, name: str) -> list[list[Record]]:
        """The samples of a pass by prompt, in the order of the set."""
        return [group for _, group in sorted(self._groups[model, name].items())]

    def write(self, model: str, name: str, order: int, records: Sequence[Record]) -> None:
        """Add the samples of a prompt, in one piece, each with ``model``, ``pass``, ``order``, and ``of``, their
        number."""
        self._file.write("".join(map(_line, records)))
        self._file.flush()
        # Numbers as they are read back: a resumed evaluation gives the same results, bit for bit.
        self._groups[model, name][order] = [json.loads(_line(record)) for record in records]

    def close(self) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"


def _write_whole(path: Path, text: str) -> None:
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_samples(path: Path) -> Iterator[Record]:
    """The lines of a file of samples; a torn last one is left out, and so are damaged ones, which are logged."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                logger.warning("%s, line %d is damaged and left out: %s", path, number, error)


def sample_records(group: SampleGroup, shared: Mapping[str, Any]) -> Iterator[Record]:
    for row, one in zip(sample_table([group]), group.members, strict=True):
        yield {
            **shared,
            "order": group.order,
            "of": len(group.members),
            "numbers": one.reward.metrics,
            "vote": voted_answer(row["response"], row["prompt"]),
            "tokens": row.pop("response_tokens"),
            **row,
        }


def answers_of(groups: Iterable[Sequence[Record]], correct_from: float, select_by: str) -> list[Answers]:
    """The samples of each prompt as numbers. Raises ``DataError``: no sample has the number ``select_by``; the message
    lists those that there are."""
    found: list[Answers] = []
    known: set[str] = set()
    has_any = select_by == "score"
    for group in groups:
        scores = np.array([np.nan if one["score"] is None else one["score"] for one in group], dtype=np.float64)
        numbers = [one["numbers"] or {} for one in group]
        known.update(name for one in numbers for name in one)
        has_any = has_any or any(select_by in one for one in numbers)
        ranks = np.array([one.get(select_by, np.nan) for one in numbers], dtype=np.float64)
        # Success by the environment, if it says so; else by the score.
        succeeded = [one.get("success") for one in group]
        by_score = [one["score"] is not None and one["score"] >= correct_from for one in group]
        correct = np.array([by if own is None else bool(own) for own, by in zip(succeeded, by_score, strict=True)])
        found.append(
            Answers(
                prompt_id=group[0]["prompt_id"],
                tag=group[0]["tag"],
                scores=scores,
                ranks=scores if select_by == "score" else ranks,
                correct=correct,
                votes=merged_votes([one["vote"] for one in group], correct),
                lengths=np.array([one["tokens"] for one in group]),
                truncated=np.array([one["finish_reason"] == "length" for one in group]),
            )
        )
    if found and not has_any:
        there = ", ".join(sorted(known | {"score"}))
        raise DataError(f"evaluate.select_by: no reward returns {select_by}; there is {there}")
    return found
