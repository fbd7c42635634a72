"""Several turns: an environment whose scripted user speaks after each answer. The taskset has no end."""

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf
from vowels_v1 import share_of_vowels


class LettersData(vf.TaskData):
    turns: int


class LettersTask(vf.Task[LettersData]):
    @vf.reward
    async def vowels(self, trace: vf.Trace) -> float:
        said = [message.content or "" for message in trace.assistant_messages]
        return sum(map(share_of_vowels, said)) / max(1, len(said))

    @vf.metric
    async def answers(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class LettersTaskset(vf.Taskset[LettersTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[LettersTask]:
        for number in itertools.count():
            yield LettersTask(LettersData(turns=2 + number % 2))


class LettersEnv(vf.SingleAgentEnv):
    async def run(self, task: LettersTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as conversation:
            for turn in range(task.data.turns):
                if (await conversation.turn(f"say {turn}")).terminated:
                    break


__all__ = ["LettersEnv", "LettersTaskset"]
