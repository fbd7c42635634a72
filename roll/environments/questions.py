"""Questions of a data set, or of Reasoning Gym, as an environment of one turn; tools around it make it several."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from roll.environments.adapters import check_known
from roll.rewards.base import RewardSample
from roll.rewards.registry import build_reward


@dataclass
class Questions:
    """A row of a data set, drawn by the seed: its question is the observation, the answer ends the episode."""

    dataset_name: str
    """A file (JSON lines, Parquet, CSV), a folder of such files, or the name of a data set of the hub that is on this
    machine."""
    split: str = "train"  # split of a data set of the hub
    question_key: str = "problem"
    answer_key: str = "answer"  # column of the right answer
    reward: str = "math_rule"  # a short name or a dotted path, as `worker_cls` of a reward domain
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    mode: Literal["train", "val"] = "train"
    """Has no effect, as in ROLL's files: the seeds of training and of validation differ anyway."""
    max_steps: int = 1  # has no effect: the first answer ends the episode

    def __post_init__(self) -> None:
        self._reward = build_reward(self.reward, self.reward_kwargs)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        rows = _rows(self.dataset_name, self.split)  # not in __post_init__: options are checked without the data
        self._row = rows[random.Random(f"questions/{seed}").randrange(len(rows))]
        for key in (self.question_key, self.answer_key):
            if key not in self._row:
                raise ValueError(f"{self.dataset_name} has no column {key!r}; it has {', '.join(self._row)}")
        self._question = str(self._row[self.question_key])
        return self._question, {"state": self._question}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        sample = RewardSample(self._question, action, self._row[self.answer_key], row=dict(self._row))
        (result,) = self._reward([sample])
        if result.score is None:
            raise RuntimeError(f"reward {self.reward}: {result.error}")
        return "", result.score, True, False, {"success": result.score > 0, "state": self._question}

    def close(self) -> None:
        """Release what the reward holds."""
        self._reward.close()


math_questions = partial(Questions, reward="math_rule")
"""ROLL's ``roll_math``: the answer in ``\\boxed{}`` is compared as mathematics."""
text_questions = partial(
    Questions, reward="roll.rewards.text_rules.ExactMatch", reward_kwargs=MappingProxyType({"source": "boxed"})
)
"""ROLL's ``roll_qa``: the answer in ``\\boxed{}`` is compared without case, punctuation and articles."""


@cache
def _rows(dataset_name: str, split: str) -> list[dict[str, Any]]:
    """Once for all environments of a process."""
    from roll.datasets.reading import read_rows

    is_file = Path(dataset_name).expanduser().exists() or dataset_name.startswith("hub:")
    return [source.row for source in read_rows(dataset_name if is_file else f"hub:{dataset_name}:{split}")]


class ReasoningGymEnvironment:
    """``reasoning_gym:NAME``: one task of a procedural data set, drawn by the seed; the answer ends the episode.

    The reward is the data set's own score between 0 and 1 for the text in ``<answer>`` tags, or for the whole response
    without them. Options are those of the data set's configuration, except ``seed`` and ``size``.
    """

    built_to_check: ClassVar[bool] = True
    """It needs neither services nor data: its name and options are checked by building one."""

    def __init__(self, name: str, **config: object) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        check_known("reasoning-gym", name, DATASETS)
        for key in ("seed", "size"):
            if key in config:
                raise ValueError(f"env_config.{key} has no effect: the seed of an episode draws its task; remove it")
        self._make = lambda seed: reasoning_gym.create_dataset(name, seed=seed, size=1, **config)
        try:
            self._make(0)
        except AssertionError as error:  # how its configurations reject values
            raise ValueError(f"env_config: {error}") from error

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._dataset = self._make(seed % 2**31)
        self._entry = self._dataset[0]
        return self._entry["question"], {"state": self._entry["question"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(action)
        score = float(self._dataset.score_answer(action.strip() if answer is None else answer, self._entry))
        return "", score, True, False, {"success": score == 1.0}
