"""A single turn, as the package documents a taskset: the share of vowels in what is said."""

from collections.abc import Iterator

import verifiers.v1 as vf


def share_of_vowels(text: str) -> float:
    return sum(letter in "aeiou" for letter in text.lower()) / max(1, len(text))


class VowelsConfig(vf.TasksetConfig):
    split: str = "train"
    count: int = 16
    needs_box: bool = False


class VowelsTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def vowels(self, trace: vf.Trace) -> float:
        if self.data.name == "broken":
            raise RuntimeError("the scorer is away")
        return share_of_vowels(trace.last_reply)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class VowelsTaskset(vf.Taskset[VowelsTask, VowelsConfig]):
    def load(self) -> Iterator[VowelsTask]:
        for number in range(self.config.count):
            data = vf.TaskData(prompt=f"{self.config.split} {number}", system_prompt="say", name=self.config.split)
            yield VowelsTask(data, self.config.task)


__all__ = ["VowelsTaskset"]
