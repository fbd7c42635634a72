"""The groups of an asynchronous rollout until they leave for training, and their state in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Protocol

import numpy as np

from roll.config.plan.plan import RunAhead
from roll.datasets.types import PromptRow
from roll.rewards.base import RewardResult
from roll.rollout.groups import Drawn, FinishedGroup, GroupT, ItemT, SampleGroup
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest

FindPrompt = Callable[[str, str], PromptRow]
"""Gives the prompt of a domain by its id, the mark of its epoch included."""
State = dict[str, Any]
NO_PROGRESS: State = {"partial": [], "finished": []}
"""State of a request that has no tokens yet."""


class GroupCodec(Protocol[ItemT, GroupT]):
    """Bookkeeping of the groups that a buffer holds, each of a prompt or task (``ItemT``)."""

    @property
    def no_progress(self) -> State:
        """State of a group of which nothing is there yet."""

    def versions(self, group: GroupT) -> list[list[tuple[int, int]]]:
        """Versions of the weights that sampled each sample, or episode, each with its number of tokens."""

    def is_scored(self, group: GroupT) -> bool:
        """A complete group has its rewards."""

    def item_state(self, item: ItemT) -> State:
        """State of a prompt or task, as plain values."""

    def item_from(self, state: Mapping[str, Any]) -> ItemT:
        """The inverse of :meth:`item_state`."""

    def group_state(self, group: GroupT) -> State:
        """State of a complete group beyond its number, as plain values and arrays."""

    def group_from(self, order: int, state: Mapping[str, Any]) -> GroupT:
        """The inverse of :meth:`group_state`."""


def progress_state(request: GenerationRequest) -> State:
    """Partial samples of an unfinished request; sampling parameters are the configuration's."""
    samples = {"partial": request.partial.values(), "finished": request.finished}
    return {name: [_sample_state(sample) for sample in found] for name, found in samples.items()}


def with_progress(request: GenerationRequest, state: Mapping[str, Any]) -> GenerationRequest:
    """``request`` with what :func:`progress_state` wrote down."""
    partial, finished = (
        [
            GenerationOutput(
                request_id=request.request_id,
                sample_index=int(entry["index"]),
                token_ids=entry["token_ids"].tolist(),
                log_probs=entry["log_probs"].tolist(),
                finish_reason=entry.get("finish_reason", "abort"),
                weight_versions=_tuples([entry["weight_versions"]])[0],
                routes=entry.get("routes"),
            )
            for entry in state[name]
        ]
        for name in ("partial", "finished")
    )
    return replace(request, partial={one.sample_index: one for one in partial}, finished=tuple(finished))


def _sample_state(sample: GenerationOutput) -> State:
    return {
        "index": sample.sample_index,
        "finish_reason": sample.finish_reason,
        "weight_versions": _spans([sample.weight_versions])[0],
        "token_ids": np.asarray(sample.token_ids, dtype=np.int32),
        "log_probs": np.asarray(sample.log_probs, dtype=np.float32),
        **({} if sample.routes is None else {"routes": sample.routes}),
    }


def _spans(versions: Iterable[Iterable[Iterable[int]]]) -> list[list[list[int]]]:
    return [[list(map(int, span)) for span in spans] for spans in versions]


def _tuples(versions: Iterable[Iterable[Sequence[int]]]) -> list[list[tuple[int, int, int]]]:
    return [[(span[0], span[1], span[2]) for span in spans] for spans in versions]


@dataclass
class Ledger:
    """Groups since the run began. What was drawn and has not left in one of these ways is still held."""

    drawn: int = 0
    trained: int = 0
    filtered: int = 0
    """Rejected by ``query_filter_config``."""
    stale: int = 0
    """Given up because a token was older than training allows."""

    @property
    def held(self) -> int:
        return self.drawn - self.trained - self.filtered - self.stale


@dataclass(frozen=True)
class PromptCodec:
    """Groups of samples; ``find`` gives a prompt by its id."""

    find: FindPrompt
    no_progress: State = field(default_factory=lambda: NO_PROGRESS)

    def versions(self, group: SampleGroup) -> list[list[tuple[int, int]]]:
        return [[(version, end - first) for version, first, end in spans] for spans in group.finished.weight_versions]

    def is_scored(self, group: SampleGroup) -> bool:
        return bool(group.rewards)

    def item_state(self, item: PromptRow) -> State:
        return {"domain": item.domain, "prompt_id": item.prompt_id}

    def item_from(self, state: Mapping[str, Any]) -> PromptRow:
        return self.find(state["domain"], state["prompt_id"])

    def group_state(self, group: SampleGroup) -> State:
        finished = group.finished
        optional = {} if finished.given is None else {"given": finished.given}
        if finished.routes:
            lengths = np.array([len(routes) for routes in finished.routes])
            optional |= {"routes": np.concatenate(finished.routes), "routes_lengths": lengths}
        return {
            **self.item_state(group.prompt),
            **optional,
            "token_ids": finished.token_ids,
            "log_probs": finished.log_probs,
            "lengths": finished.lengths,
            "finish_reasons": list(finished.finish_reasons),
            "texts": list(finished.texts),
            "weight_versions": _spans(finished.weight_versions),
            "rewards": [asdict(result) for result in group.rewards],
        }

    def group_from(self, order: int, state: Mapping[str, Any]) -> SampleGroup:
        finished = FinishedGroup(
            request_id=str(order),
            token_ids=state["token_ids"],
            log_probs=state["log_probs"],
            lengths=state["lengths"],
            finish_reasons=state["finish_reasons"],
            texts=state["texts"],
            weight_versions=_tuples(state["weight_versions"]),
            given=state.get("given"),
            routes=[] if "routes" not in state else np.split(state["routes"], np.cumsum(state["routes_lengths"])[:-1]),
        )
        rewards = [RewardResult(**result) for result in state["rewards"]]
        return SampleGroup(order, self.item_from(state), finished, rewards)


@dataclass(frozen=True)
class Held(Generic[ItemT]):
    """A group that engines or rewards are at work on."""

    drawn: Drawn[ItemT]
    version: int
    """The weights that it was begun with: no token is older."""


class ReplayBuffer(Generic[ItemT, GroupT]):
    """Groups by their state: being generated, being scored, ready to be trained on. Pure bookkeeping.

    Every group goes ``begin -> generated -> scored`` and leaves by :meth:`take`, by a filter, or for its age. Steps
    take the oldest first.
    """

    def __init__(self, ahead: RunAhead, codec: GroupCodec[ItemT, GroupT]) -> None:
        self.ahead = ahead
        self.codec = codec
        self.ledger = Ledger()
        self._generating: dict[int, Held[ItemT]] = {}
        self._scoring: dict[int, tuple[GroupT, int]] = {}
        self._ready: dict[int, tuple[GroupT, int]] = {}

    @property
    def num_held(self) -> int:
        return len(self._generating) + len(self._scoring) + len(self._ready)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def generating(self) -> dict[int, Held[ItemT]]:
        """The groups being generated, by the order of drawing."""
        return dict(self._generating)

    def begin(self, drawn: Drawn[ItemT], version: int) -> None:
        """A group was drawn and begun."""
        assert drawn.order not in self._generating, f"group {drawn.order} was begun before"
        self._generating[drawn.order] = Held(drawn, version)
        self.ledger.drawn += 1

    def generated(self, group: GroupT) -> None:
        """All samples of a group are there."""
        begun = self._generating.pop(group.order)
        versions = (version for sample in self.codec.versions(group) for version, _ in sample)
        # A group in which nothing was sampled is as old as its beginning.
        self._scoring[group.order] = (group, min(versions, default=begun.version))

    def scored(self, group: GroupT, accepted: bool) -> bool:
        """The rewards of a group are there; False where the group was given up in the meantime."""
        if group.order not in self._scoring:
            return False
        _, version = self._scoring.pop(group.order)
        if accepted:
            self._ready[group.order] = (group, version)
        else:
            self.ledger.filtered += 1
        return True

    def can_take(self, step: int) -> bool:
        """See :meth:`RunAhead.can_be_taken`."""
        if self.num_ready < self.ahead.prompts_per_step:
            return False
        ready = Counter(version for _, version in self._ready.values())
        unfinished = Counter(held.version for held in self._generating.values())
        unfinished.update(version for _, version in self._scoring.values())
        return self.ahead.can_be_taken(step, ready, unfinished)

    def take(self, step: int) -> list[GroupT]:
        """The groups of a step, those with the oldest tokens first chosen, in the order in which they were drawn."""
        # Oldest first: `RunAhead.can_be_taken` counts on it when it promises that no held group becomes too old.
        by_age = sorted(self._ready, key=lambda order: (self._ready[order][1], order))
        chosen = sorted(by_age[: self.ahead.prompts_per_step])
        groups = [self._ready.pop(order) for order in chosen]
        assert not any(self.ahead.is_too_old(version, step) for _, version in groups), "stale groups must have left"
        self.ledger.trained += len(groups)
        return [group for group, _ in groups]

    def drop_stale(self, step: int) -> list[int]:
        """Give up what is too old for ``step`` and for all steps after it.

        Returns:
            Those of them that engines are still at work on.
        """
        unfinished = [order for order, held in self._generating.items() if self.ahead.is_too_old(held.version, step)]
        for order in unfinished:
            del self._generating[order]
        self.ledger.stale += len(unfinished)
        # Rewards in flight are not cancelled: `scored` passes over groups that have left.
        for groups in (self._scoring, self._ready):
            stale = [order for order, (_, version) in groups.items() if self.ahead.is_too_old(version, step)]
            for order in stale:
                del groups[order]
            self.ledger.stale += len(stale)
        return unfinished

    def check(self) -> None:
        """Assert that every drawn group has left once or is held in exactly one place."""
        assert self.ledger.held == self.num_held, (self.ledger, self.num_held)

    def counts(self) -> dict[str, int]:
        """The ledger and where the rest is; ``drawn`` is the sum of the others."""
        held = {"generating": len(self._generating), "scoring": len(self._scoring), "ready": self.num_ready}
        return asdict(self.ledger) | held

    def state_dict(self, progress: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Everything held, as plain values and arrays.

        Args:
            progress: state of every group being generated (:meth:`~roll.rollout.flow.GroupFlow.progress_state`).
        """
        assert progress.keys() == self._generating.keys(), "every unfinished group has its request"
        complete = self._scoring | self._ready
        return {
            "ledger": asdict(self.ledger),
            "unfinished": [
                self.codec.item_state(held.drawn.item)
                | {"order": order, "version": held.version, "progress": progress[order]}
                for order, held in self._generating.items()
            ],
            "complete": [
                self.codec.group_state(group) | {"order": order, "version": version}
                for order, (group, version) in complete.items()
            ],
        }

    def load_state_dict(
        self, state: Mapping[str, Any]
    ) -> tuple[list[tuple[Drawn[ItemT], Mapping[str, Any]]], list[GroupT]]:
        """Hold what was held.

        Returns:
            What is to be generated further, each with its progress, and the groups that are to be scored.
        """
        self.ledger = Ledger(**state["ledger"])
        unfinished = []
        for entry in state["unfinished"]:
            drawn = Drawn(int(entry["order"]), self.codec.item_from(entry))
            self._generating[drawn.order] = Held(drawn, int(entry["version"]))
            unfinished.append((drawn, entry["progress"]))
        for entry in state["complete"]:
            group = self.codec.group_from(int(entry["order"]), entry)
            # Groups that a filter rejected left when they were scored: what has rewards was accepted.
            place = self._ready if self.codec.is_scored(group) else self._scoring
            place[group.order] = (group, int(entry["version"]))
        self.check()
        return unfinished, [group for group, _ in self._scoring.values()]
