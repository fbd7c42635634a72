"""Verifiers: the reward of an episode by a reward function or a command."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from roll.agents.conversation import Call
from roll.agents.episode import Agent, Episode, EpisodeOver, Model, Task
from roll.agents.programs import ProgramError, program_environment, running
from roll.datasets.forms import read_ground_truth
from roll.rewards.base import GuardedReward, RewardSample, finite_number
from roll.rewards.custom import Limits
from roll.rewards.registry import build_reward
from roll.rewards.thoughts import opened_thought, said_by

# The column with the right answer; without it, the columns of verl's and SkyRL's data sets are looked up.
TRUTH = "ground_truth"


class RewardVerifier:
    """Scores an episode by a reward of ``roll.rewards``, or a user's function.

    A call raises ``EpisodeOver`` (``environment_error``, the reason in ``episode.error``) where the verifier itself has
    failed, as that of a :class:`CommandVerifier` does.

    Args:
        worker_cls: a short name, or the dotted path of a function
            ``(prompt, response, ground_truth, **row) -> float | dict``, as in a section ``rewards.<name>``.
        answer_key: column of the row with the ground truth.
        scores: the response to score: ``answer``, ``episode`` or ``solution``, as of the key ``verifier.scores``.

    Raises:
        RewardOptionError: a reward that does not exist, an option that it does not have or cannot use, or a host that
            does not give what the reward needs.
    """

    def __init__(
        self,
        worker_cls: str,
        options: Mapping[str, Any] | None = None,
        answer_key: str = TRUTH,
        timeout: float | None = None,
        scores: str = "answer",
    ) -> None:
        self._scores = scores
        reward = build_reward(worker_cls, options, Limits(timeout))
        self._reward = GuardedReward(worker_cls, reward)
        self._reward.check_host()
        self._answer_key = answer_key
        # Rewards are called from one thread at a time, unless they declare more.
        self._threads = ThreadPoolExecutor(int(getattr(reward, "concurrent_calls", 1)), thread_name_prefix="verifier")

    async def __call__(self, task: Task, model: Model, episode: Episode, folder: str | None = None) -> float:
        if not episode.calls:
            return 0.0
        call, row = episode.calls[-1], dict(task.row)
        prompt, response = self._shown(call, model, episode)
        scored = [call] if self._scores == "answer" else episode.calls
        sample = RewardSample(
            prompt=prompt,
            response=response,
            ground_truth=read_ground_truth(row) if self._answer_key == TRUTH else row.get(self._answer_key),
            finish_reason=call.finish_reason,
            row=row,
            num_tokens=sum(len(one.response_ids) for one in scored),
        )
        loop = asyncio.get_running_loop()
        (result,) = await loop.run_in_executor(self._threads, self._reward, [sample])
        episode.metrics |= result.metrics
        if result.error is not None or result.score is None:
            raise episode.fault(f"reward: {result.error}")
        return result.score

    def _shown(self, call: Call, model: Model, episode: Episode) -> tuple[str, str]:
        """The prompt and the response to score."""
        if self._scores == "episode":
            # The first prompt, and everything after it: responses without thoughts, and the observations in between.
            texts = []
            for one in episode.calls:
                shown = model.text_of(one.new_ids[: len(one.new_ids) - one.opening])
                opened = opened_thought(shown)
                texts.append(shown.rpartition(opened)[0] if opened else shown)
                texts.append(said_by(model.text_of(one.whole_response), opened))
            return texts[0], "".join(texts[1:])
        if self._scores == "solution":
            behind = model.conversations.ids_behind_prompt(call)
            prompt = model.conversations.prompt_ids(call) + call.response_ids
            return model.text_of(prompt[: len(prompt) - len(behind)]), model.text_of(behind, special=False)
        return (
            # `-0` would leave nothing: without an opening the whole prompt is shown.
            model.text_of(model.conversations.prompt_ids(call)[: -call.opening or None]),
            model.text_of(call.whole_response, ended=True),
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._reward.close()


@dataclass(eq=False)
class CommandVerifier:
    """A command whose last line of output is the reward; without output, exit status 0 is 1 and status 1 is 0.

    It gets ``{"task": ..., "answer": ..., "messages": [...]}`` on standard input, and the agent's folder as the
    environment variable ``ROLL_SCRATCH``.
    """

    command: Sequence[str]
    timeout: float = 60.0  # seconds

    async def __call__(self, task: Task, model: Model, episode: Episode, folder: str | None = None) -> float:
        call = episode.calls[-1] if episode.calls else None
        stdin = {
            "task": task.body,
            "answer": "" if call is None else str(call.message.get("content") or ""),
            "messages": [] if call is None else [*call.messages, call.message],
        }
        environment = program_environment({"ROLL_SEED": str(task.seed), "ROLL_SCRATCH": folder or ""})
        try:
            async with running(self.command, environment, stdin, os.getcwd()) as program:
                ended = await asyncio.wait_for(program.wait(), self.timeout)
        except TimeoutError:
            raise episode.fault(f"verifier {self.command[0]} took more than {self.timeout:g} s") from None
        except ProgramError as error:
            raise episode.fault(f"verifier {error}") from error
        lines = ended.output.strip().splitlines()
        if not lines and ended.status in (0, 1):
            return float(ended.status == 0)
        try:
            reward = finite_number(lines[-1])
            if ended.status != 0 or reward is None:
                raise ValueError
            return reward
        except (ValueError, IndexError):
            raise episode.fault(f"verifier {self.command[0]} gives no reward: {ended}") from None

    def close(self) -> None:
        """Nothing to release."""


Verifier = RewardVerifier | CommandVerifier


@dataclass(eq=False)
class ScoredAgent:
    """Adds a verifier's score of the whole episode to the reward of an agent's last turn.

    Episodes that a limit of turns or tokens has ended are scored as they are; a fault or the deadline leaves nothing to
    score.
    """

    agent: Agent
    verifier: Verifier

    async def run(self, task: Task, model: Model, episode: Episode) -> float:
        """Run the agent; ``EpisodeOver`` as it raises that, ``environment_error`` where the verifier has failed."""
        ended: EpisodeOver | None = None
        earned: float | None = None
        try:
            earned = await self.agent.run(task, model, episode)
        except EpisodeOver as over:
            if over.outcome in ("environment_error", "agent_error") or not episode.calls:
                raise
            ended = over
        score = await self.verifier(task, model, episode)
        episode.metrics["verifier_score"] = score
        if ended is not None:
            model.reward(score)
            raise ended
        return score + (earned or 0.0)
