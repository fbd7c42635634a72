"""Engines without a model: every token says which it is, so that a lost or doubled one shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roll.rollout.groups import EngineCommand, EngineReport, FinishedGroup
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, VersionSpan
from tests.rollout.fake_clusters import EngineRanks

LONGEST = 40


def response(seed: int, index: int) -> list[int]:
    """Tokens of sample ``index`` of a request with this seed, whoever generates it and however often it is stopped:
    one in eight is long."""
    rng = random.Random(f"{seed}/{index}")
    length = rng.randint(20, LONGEST) if rng.random() < 0.125 else rng.randint(1, 6)
    return [rng.randrange(1 << 30) for _ in range(length)]


@dataclass
class _Request:
    given: GenerationRequest
    begun: dict[int, GenerationOutput]
    finished: list[GenerationOutput]


@dataclass
class TokenEngines(EngineRanks):
    """A cluster of engines that sample up to ``per_turn`` tokens of each of their ``slots`` samples a turn."""

    rng: random.Random = field(default_factory=random.Random)
    per_turn: int = 3
    slots: int = 8
    respond: Callable[[int, int], list[int]] = response
    """Seed and index to the sample."""
    version: int = -1
    tokens: int = 0
    """Sampled by all engines together."""

    def __post_init__(self) -> None:
        self._held: list[dict[str, _Request]] = [{} for _ in range(self.world_size)]

    def exchange(self, version: int) -> int:
        """New weights for all engines."""
        assert not self.calls, "engines must be between turns when their weights are exchanged"
        self.version = version
        return version

    def advance(self, rank: int, command: EngineCommand) -> EngineReport:
        held = self._held[rank]
        for request_id in command.abort:
            held.pop(request_id, None)
        recalled = [held.pop(request_id) for request_id in command.recall if request_id in held]
        for request in command.add:
            assert request.request_id not in held
            held[request.request_id] = _Request(request, dict(request.partial), list(request.finished))
        if command.work:
            self._work(held)
        done = [held.pop(name) for name, one in list(held.items()) if len(one.finished) == one.given.num_samples]
        return EngineReport(
            groups=[_packed(one) for one in done],
            recalled=[_with_progress(one) for one in recalled],
            num_unfinished=sum(one.given.num_samples - len(one.finished) for one in held.values()),
            busy_seconds=1.0,
        )

    def _work(self, held: dict[str, _Request]) -> None:
        running = [(one, index) for one in held.values() for index in _unfinished(one)][: self.slots]
        for one, index in running:
            name = one.given.request_id
            before = one.begun.pop(index, GenerationOutput(name, index, [], [], "abort"))
            whole = self.respond(one.given.params.seed or 0, index)
            assert list(before.token_ids) == whole[: len(before.token_ids)], "continued behind other tokens"
            end = min(len(whole), len(before.token_ids) + self.rng.randint(1, self.per_turn))
            self.tokens += end - len(before.token_ids)
            spans = _joined(before.weight_versions, (self.version, len(before.token_ids), end))
            log_probs = [-token / 2**30 for token in whole[:end]]
            if end == len(whole):
                one.finished.append(GenerationOutput(name, index, whole, log_probs, "stop", spans))
            else:
                one.begun[index] = GenerationOutput(name, index, whole[:end], log_probs, "abort", spans)


def _unfinished(one: _Request) -> list[int]:
    done = {output.sample_index for output in one.finished}
    return [index for index in range(one.given.num_samples) if index not in done]


def _packed(one: _Request) -> FinishedGroup:
    samples = sorted(one.finished, key=lambda output: output.sample_index)
    return FinishedGroup.from_samples(samples, [f"{len(sample.token_ids)}" for sample in samples])


def _with_progress(one: _Request) -> GenerationRequest:
    given = one.given
    fields = (given.request_id, given.prompt_token_ids, given.params, given.num_samples)
    return GenerationRequest(*fields, partial=one.begun, finished=tuple(one.finished))


def _joined(spans: Sequence[VersionSpan], new: VersionSpan) -> list[VersionSpan]:
    """The spans with ``new`` behind them, which lengthens the last where the version is the same."""
    if spans and spans[-1][0] == new[0]:
        return [*spans[:-1], (new[0], spans[-1][1], new[2])]
    return [*spans, new]
