"""Rollout loops that runs of this folder name by their path."""

from __future__ import annotations

from roll.datasets.types import PromptRow
from roll.rollout.groups import SampleGroup
from roll.rollout.loops import RolloutContext


class PlainLoop:
    """The loop of a run that names none."""

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        finished = await context.generate(prompt.token_ids)
        return await context.compute_rewards(context.group(prompt, finished))


class CheckTwice:
    """Each sample answers, is given three tokens, and answers again."""

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        drafts = [await one for one in [context.start(prompt.token_ids, 1) for _ in range(context.group_size)]]
        asked = [[*prompt.token_ids, *draft.token_ids.tolist(), 5, 6, 7] for draft in drafts]
        finals = [await one for one in [context.start(tokens, 1) for tokens in asked]]
        return await context.compute_rewards(context.group(prompt, *finals))
