"""A tool that all tasks share: sums whose result the tool gives."""

import itertools

import verifiers.v1 as vf


class CalculatorToolset(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = "math"

    @vf.tool
    def calc(self, expression: str) -> str:
        """Add numbers, as in 1+2."""
        return str(sum(int(number) for number in expression.split("+")))


class CalculatorData(vf.TaskData):
    answer: str


class CalculatorTask(vf.Task[CalculatorData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split()[-1:] == [self.data.answer])

    @vf.metric
    async def results(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class CalculatorConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()
    largest: int = 19


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        return [CalculatorToolset(config.tools)]

    def load(self) -> list[CalculatorTask]:
        return [
            CalculatorTask(CalculatorData(prompt=f"{first}+{second}", answer=str(first + second)), self.config.task)
            for first, second in itertools.product(range(10, self.config.largest + 1), repeat=2)
        ]


__all__ = ["CalculatorTaskset"]

if __name__ == "__main__":
    CalculatorToolset.run()
