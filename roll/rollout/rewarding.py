"""Hands finished groups to the reward workers of their domain and brings the scores back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import cast

from roll.distributed import Cluster, PendingCall
from roll.rewards.base import RewardResult
from roll.rollout.groups import SampleGroup


class RewardRouter:
    """One reward cluster a domain; a batch of groups goes to the worker with the fewest samples in hand."""

    def __init__(self, clusters: Mapping[str, Cluster]) -> None:
        self._clusters = clusters
        self._load = {domain: [0] * cluster.world_size for domain, cluster in clusters.items()}
        self._calls: dict[PendingCall, tuple[str, int, list[SampleGroup]]] = {}

    @property
    def pending(self) -> list[PendingCall]:
        return list(self._calls)

    @property
    def num_pending_groups(self) -> int:
        return sum(len(groups) for _, _, groups in self._calls.values())

    def submit(self, groups: list[SampleGroup]) -> None:
        """Start scoring ``groups``, spread over the workers of each domain."""
        by_domain: dict[str, list[SampleGroup]] = defaultdict(list)
        for group in groups:
            by_domain[group.prompt.domain].append(group)
        for domain, members in by_domain.items():
            workers = min(len(self._load[domain]), len(members))
            for part in range(workers):
                self._submit_to_least_loaded(domain, members[part::workers])

    def _submit_to_least_loaded(self, domain: str, groups: list[SampleGroup]) -> None:
        load = self._load[domain]
        rank = load.index(min(load))
        samples = [sample for group in groups for sample in group.reward_samples()]
        load[rank] += len(samples)
        call = self._clusters[domain].submit(rank, "score", samples)
        self._calls[call] = (domain, rank, groups)

    def take(self, call: PendingCall) -> list[SampleGroup]:
        """The scored groups of a call that is done; other calls give an empty list."""
        if call not in self._calls:
            return []
        domain, rank, groups = self._calls.pop(call)
        results = cast(list[RewardResult], call.result())
        self._load[domain][rank] -= len(results)
        begin = 0
        for group in groups:
            group.rewards = results[begin : begin + group.num_samples]
            begin += group.num_samples
        return groups

    def drop_pending(self) -> None:
        """Forget scores that nobody waits for any more."""
        for domain, rank, groups in self._calls.values():
            self._load[domain][rank] -= sum(group.num_samples for group in groups)
        self._calls.clear()
