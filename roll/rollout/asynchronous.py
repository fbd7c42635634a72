"""Rollout that goes on while training does: engines and rewards are kept busy across steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from roll.distributed import PendingCall
from roll.rollout.engines import EnginePool
from roll.rollout.flow import GroupFlow, Rejections
from roll.rollout.groups import SampleGroup
from roll.rollout.replay import ReplayBuffer
from roll.rollout.replay_state import FindPrompt
from roll.strategies.engines.requests import GenerationRequest

Result = TypeVar("Result")


class AsyncScheduler:
    """Begins groups as the buffer has room for them, and hands out the groups of each step.

    One thread drives everything: whoever waits for something else keeps the rollout going in the meantime
    (:meth:`work`), and a failure of either side ends the wait at once.

    Args:
        num_steps: steps of the run; no group is begun that none of them needs.
        deadline: seconds after which a step without any progress is given up.
        in_flight: weights are exchanged while samples are half-way, which then go on with the new ones; False: the
            samples under way are finished first.
        takes_turns: the engines' devices are others' between two :meth:`collect`: what is half-way when a step has its
            groups is taken back from the engines, and goes on with the next step's weights.
    """

    def __init__(
        self,
        engines: EnginePool,
        flow: GroupFlow,
        buffer: ReplayBuffer,
        num_steps: int,
        deadline: float,
        in_flight: bool = True,
        takes_turns: bool = False,
    ) -> None:
        self._engines = engines
        self._flow = flow
        self._num_steps = num_steps
        self._deadline = deadline
        self._in_flight = in_flight
        self._takes_turns = takes_turns
        self._aside: list[GenerationRequest] = []
        self._version = 0
        self._taken_at_version = 0
        self._may_begin = False
        self._rejections = Rejections()
        self.buffer = buffer

    def collect(self, step: int) -> list[SampleGroup]:
        """The groups that step ``step`` trains on, in the order in which they were drawn.

        Raises:
            RolloutExhausted: filters rejected too many groups for each wanted one.
        """
        self._go_on()
        self._absorb([])
        self._flow.abort(self.buffer.drop_stale(step))
        self._may_begin = True
        self._fill()
        while not self.buffer.can_take(step):
            self.work(self._deadline)
        groups = self.buffer.take(step)
        self._taken_at_version += len(groups)
        self._rejections = Rejections()
        if self._takes_turns:
            self._set_aside()
        else:
            self._fill()
        return groups

    def work(self, timeout: float | None, others: Sequence[PendingCall] = ()) -> list[PendingCall]:
        """Wait until something is done, of the rollout or of ``others``, and act on it; what fails, on either side, is
        raised.

        Args:
            timeout: seconds; None: as long as the calls' own deadlines allow.

        Returns:
            The calls that are done.
        """
        done = self._flow.wait(timeout, others)
        self._absorb(done)
        self._fill()
        return done

    def exchange(self, version: int, transfer: Callable[[], Result]) -> Result:
        """Bring the engines to ``version`` by ``transfer``, with no turn in flight; they begin again in
        :meth:`collect`."""
        self._may_begin = False
        while self._engines.num_outstanding + self._flow.num_scoring and not self._in_flight:
            self.work(self._deadline)
        self._engines.pause(self._deadline)
        self._engines.readmit()
        result = transfer()
        self._version = version
        self._taken_at_version = 0
        return result

    @contextmanager
    def engines_free(self) -> Iterator[None]:
        """Engines and rewards for something else, between :meth:`exchange` and :meth:`collect`: what they are at work
        on is taken back and goes on afterwards."""
        self._absorb([])
        while self._flow.num_scoring:
            self.work(self._deadline)
        self._set_aside()
        self._engines.resume()
        yield

    def state_dict(self) -> dict[str, Any]:
        """Everything that is held, unfinished samples with their tokens so far: plain values and arrays."""
        requests = self._engines.recall(deadline=self._deadline)
        self._absorb([])
        self._engines.submit(requests)
        return self.buffer.state_dict(self._flow.progress_of([*self._aside, *requests]))

    def state_between_steps(self) -> dict[str, Any]:
        """As :meth:`state_dict`, without a word to the engines: what they have of unfinished samples is not in it."""
        nothing: dict[str, Any] = {"partial": [], "finished": []}
        progress = dict.fromkeys(self.buffer.generating, nothing)
        return self.buffer.state_dict(progress | self._flow.progress_of(self._aside))

    def load_state_dict(self, state: Mapping[str, Any], find: FindPrompt) -> None:
        """Go on where ``state`` was taken; before the first :meth:`exchange`. ``find`` gives a prompt by its id."""
        self._aside += self._flow.take_up(*self.buffer.load_state_dict(state, find))

    def _set_aside(self) -> None:
        """Leave the engines without work."""
        self._may_begin = False
        self._aside += self._engines.recall(deadline=self._deadline)
        self._absorb([])  # what was finished meanwhile

    def _go_on(self) -> None:
        """Let the engines go on with what they had been at work on."""
        requests, self._aside = self._aside, []
        self._engines.submit(requests)
        self._engines.resume()

    def _absorb(self, done: Sequence[PendingCall]) -> None:
        progress = self._flow.advance(done)
        for group in progress.generated:
            self.buffer.generated(group)
        for group in progress.accepted:
            self.buffer.scored(group, accepted=True)
        for group in progress.rejected:
            if self.buffer.scored(group, accepted=False):
                self._rejections.add(group)
        if progress.rejected:
            self._rejections.check(self.buffer.ahead.prompts_per_step, self.buffer.num_ready)

    def _fill(self) -> None:
        """Begin as many groups as there is room for."""
        if not self._may_begin:
            return
        ahead = self.buffer.ahead
        needed = (self._num_steps - self._version) * ahead.prompts_per_step + ahead.num_additional
        count = min(ahead.capacity, needed) - self._taken_at_version - self.buffer.num_held
        if count > 0:
            for one in self._flow.start(count):
                self.buffer.begin(one.order, one.prompt, self._version)
