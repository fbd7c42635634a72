"""Samples that wait for a row, and which of them start next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from roll.strategies.engines.requests import GenerationOutput, GenerationRequest
from roll.strategies.hf_infer.cache import CachedSequence
from roll.strategies.hf_infer.decoder import PromptStates

MAX_PREFILL_TOKENS = 8192
"""Tokens of prompts computed at a time, padding included: bounds memory and the wait of running rows."""
_MAX_GATHERED_TOKENS = 8 * MAX_PREFILL_TOKENS  # of prompts of which a prefix is copied

Found = tuple[CachedSequence, int]


@dataclass(slots=True)
class QueuedGroup:
    """Samples of a request that begin with the same tokens and have not started yet."""

    request: GenerationRequest
    seed: int
    stop_ids: tuple[int, ...]
    waiting: deque[int]  # their indices
    token_ids: Sequence[int]  # tokens that are computed before the next one can be sampled
    carried: GenerationOutput | None = None  # what a sample begun elsewhere has; it waits alone
    prompt: PromptStates | None = None  # kept when only some of the samples found a free row
    found: Found | None = None  # while it is admitted: what the prefix cache has

    def aborted(self) -> list[GenerationOutput]:
        begun = self.carried or GenerationOutput(self.request.request_id, 0, [], [], "abort")
        return [replace(begun, request_id=self.request.request_id, sample_index=index) for index in self.waiting]


class Queue:
    """Groups of samples in the order in which they came."""

    def __init__(self) -> None:
        self._groups: deque[QueuedGroup] = deque()

    def __iter__(self) -> Iterator[QueuedGroup]:
        return iter(self._groups)

    def add(self, request: GenerationRequest, seed: int, stop_ids: tuple[int, ...]) -> None:
        """Queue the unfinished samples of a request: those that are begun each by itself, after their own tokens."""
        wanted, prompt = request.unfinished_samples, request.prompt_token_ids
        if fresh := deque(index for index in wanted if index not in request.partial):
            self._groups.append(QueuedGroup(request, seed, stop_ids, fresh, prompt))
        for index in wanted:
            if (begun := request.partial.get(index)) is not None:
                whole = [*prompt, *begun.token_ids]
                self._groups.append(QueuedGroup(request, seed, stop_ids, deque([index]), whole, begun))

    def chosen(self, free: int, find: Callable[[QueuedGroup], Found | None]) -> list[tuple[QueuedGroup, int]]:
        """The groups that start in ``free`` rows, first come first served, with the number of their samples that do; as
        many as can be computed at a time. ``find`` says what the prefix cache has of a group's tokens."""
        admitted: list[tuple[QueuedGroup, int]] = []
        longest, longest_whole = 0, 0
        for group in self._groups:
            if not free:
                break
            group.found = find(group) if group.prompt is None else None
            whole, number = len(group.token_ids), len(admitted) + 1
            # Of each prompt only the rest is computed.
            longest = max(longest, whole - (group.found[1] if group.found is not None else 0))
            longest_whole = max(longest_whole, whole)
            is_too_much = longest * number > MAX_PREFILL_TOKENS or longest_whole * number > _MAX_GATHERED_TOKENS
            if admitted and is_too_much:
                break
            count = min(free, len(group.waiting))
            admitted.append((group, count))
            free -= count
        return admitted

    def drop_started(self) -> None:
        """Forget the groups at the front of which no sample waits any more."""
        while self._groups and not self._groups[0].waiting:
            self._groups.popleft()

    def remove(self, request_ids: Collection[str]) -> list[QueuedGroup]:
        """Take out the groups of these requests."""
        removed = [group for group in self._groups if group.request.request_id in request_ids]
        self._groups = deque(group for group in self._groups if group.request.request_id not in request_ids)
        return removed

    def clear(self) -> None:
        self._groups.clear()
