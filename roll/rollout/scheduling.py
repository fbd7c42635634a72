"""Which groups a training step gets: collected for the step, or ahead of it while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roll.distributed import PendingCall
from roll.rollout.engines import EnginePool
from roll.rollout.filters import GroupFilter
from roll.rollout.flow import DrawPrompts, GroupFlow, GroupSettings, Rejections
from roll.rollout.groups import SampleGroup
from roll.rollout.loops import RolloutLoop, make_flow
from roll.rollout.replay import FindPrompt, ReplayBuffer
from roll.rollout.rewarding import RewardRouter
from roll.strategies.generation import GenerationRequest, SamplingParams


@dataclass
class RolloutResult:
    """Groups in the order in which their prompts were drawn, and what it took to get them."""

    groups: list[SampleGroup]
    num_drawn: int = 0
    num_filtered: int = 0
    num_aborted: int = 0
    rejected_mean_scores: list[float] = field(default_factory=list)


class RolloutScheduler:
    """Keeps engines and reward workers busy until enough groups have been accepted.

    Args:
        seed: see :class:`~roll.rollout.flow.GroupSettings`.
        deadline: seconds after which a step without any progress is given up (with a report of who did not answer).
    """

    def __init__(self, engines: EnginePool, rewards: RewardRouter, seed: int, deadline: float) -> None:
        self._engines = engines
        self._rewards = rewards
        self._seed = seed
        self._deadline = deadline

    def collect(
        self,
        draw: DrawPrompts,
        num_prompts: int,
        group_size: int,
        params: SamplingParams,
        first_draw: int,
        filters: Mapping[str, GroupFilter] | None = None,
        num_additional: int = 0,
        loop: RolloutLoop | None = None,
    ) -> RolloutResult:
        """Generate and score ``group_size`` samples for each of ``num_prompts`` prompts.

        Args:
            first_draw: how many prompts the run has drawn before; continues the count of draws.
            filters: by domain; a rejected group is replaced by another prompt's.
            num_additional: prompts to run beyond the need at any moment, so that a rejected group is replaced by one
                that is under way already; the first to finish count, the rest is aborted.
            loop: what becomes of each prompt; None: its samples are generated and scored.

        Raises:
            RolloutExhausted: more than ``MAX_DRAWS_PER_WANTED`` groups for each wanted one were rejected by filters or
                could not be scored.
        """
        settings = GroupSettings(group_size, params, self._seed, filters or {})
        flow = make_flow(self._engines, self._rewards, draw, settings, first_draw, loop)
        collection = Collection(flow, num_prompts, num_additional)
        while not collection.complete:
            collection.advance(flow.wait(self._deadline))
        result = collection.finish()
        self._rewards.drop_pending()
        self._engines.drain(self._deadline)
        return result


class Collection:
    """``wanted`` groups of a flow that somebody drives: begun when it is made, and :attr:`complete` when it has all of
    them or there are no more. See :meth:`RolloutScheduler.collect`."""

    def __init__(self, flow: GroupFlow, wanted: int, additional: int = 0) -> None:
        self._flow = flow
        self._wanted = wanted
        self._additional = additional
        self._first_draw = flow.next_order
        self._accepted: list[SampleGroup] = []
        self._rejections = Rejections()
        flow.start(wanted + additional)

    @property
    def complete(self) -> bool:
        nothing_left = self._flow.dry and not self._flow.num_under_way
        return len(self._accepted) >= self._wanted or nothing_left

    def advance(self, done: Sequence[PendingCall]) -> None:
        """Act on calls that are done."""
        progress = self._flow.advance(done)
        self._accepted += progress.accepted
        for group in progress.rejected:
            self._rejections.add(group)
        missing = self._wanted - len(self._accepted) - self._flow.num_under_way
        if progress.rejected and missing + self._additional > 0 and not self.complete:
            self._rejections.check(self._wanted, len(self._accepted))
            self._flow.start(missing + self._additional)

    def finish(self) -> RolloutResult:
        """Abort what is not needed any more and return the accepted groups in order of drawing."""
        surplus = max(0, len(self._accepted) - self._wanted)
        num_under_way = self._flow.num_under_way
        self._flow.abort()
        return RolloutResult(
            groups=sorted(self._accepted[: self._wanted], key=lambda group: group.order),
            num_drawn=self._flow.next_order - self._first_draw,
            num_filtered=self._rejections.count,
            num_aborted=num_under_way + surplus,
            rejected_mean_scores=self._rejections.mean_scores,
        )


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
