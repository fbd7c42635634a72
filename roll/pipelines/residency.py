"""Roles that share devices take turns: what a phase needs is brought onto the devices, what it does not need leaves.

A role that shares its devices with no other role never moves.  Nor does anything on a host whose device memory is its
host memory, unless ``is_offload_states: true`` asks for it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from roll.config.plan.plan import Plan
from roll.config.roles import GenerationWorkerConfig
from roll.distributed import Cluster, DeadlineExceeded, PendingCall, RemoteError
from roll.distributed.signals import ending
from roll.platforms import current_platform
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import StateKind
from roll.workers.generation import GenerationWorker
from roll.workers.model import ModelWorker

logger = logging.getLogger(__name__)

WEIGHTS = frozenset({StateKind.MODEL_PARAMS})
TRAINING = frozenset({StateKind.MODEL_PARAMS, StateKind.OTHER_PARAMS, StateKind.OPTIMIZER_STATES})
GENERATION = frozenset({StateKind.MODEL_PARAMS, StateKind.KV_CACHE})


def moves_states(is_offload_states: bool | None) -> bool:
    """The value of the key; null: true where leaving a device frees its memory."""
    return current_platform().device_type != "cpu" if is_offload_states is None else is_offload_states


@dataclass
class _Tenant:
    """A role on shared devices, and which of its states are there."""

    cluster: Cluster
    devices: frozenset[int]
    states: frozenset[StateKind]
    """All that it has."""
    resident: set[StateKind] = field(default_factory=set)

    @property
    def generates(self) -> bool:
        return StateKind.KV_CACHE in self.states

    def offload(self, kinds: Collection[StateKind]) -> None:
        if self.generates:
            self._ask_engines(self.cluster.call_all(GenerationWorker.sleep))
            self.resident.clear()
        else:
            self.cluster.call_all(ModelWorker.offload_states, sorted(kinds)).result()
            self.resident -= set(kinds)

    def onload(self, kinds: Collection[StateKind]) -> None:
        if self.generates:
            self._ask_engines(self.cluster.call_all(GenerationWorker.wake, StateKind.KV_CACHE not in kinds))
        else:
            self.cluster.call_all(ModelWorker.load_states, sorted(kinds)).result()
        self.resident |= set(kinds)

    def _ask_engines(self, call: PendingCall) -> None:
        """Wait for the engines. Those that are lost are left out as long as there are others."""
        role = self.cluster.role
        timeout = role.engine_timeout if isinstance(role, GenerationWorkerConfig) else None
        try:
            call.within(timeout).result()
        except RemoteError as loss:
            silent = loss.silent_ranks if isinstance(loss, DeadlineExceeded) else []
            lost = {*silent, *(report.rank for report in loss.reports)}
            if lost.issuperset(self.cluster.live_ranks):
                raise
            for rank in lost:
                self.cluster.leave_out(rank)
            logger.warning("an engine is lost, and the run goes on with the others:\n%s", loss)


class Residency:
    """Moves the states of roles that share devices.

    Args:
        plan: says which devices each role has.
        enabled: False: everything stays where it is.
    """

    def __init__(self, plan: Plan, enabled: bool) -> None:
        shared = {name: role for name, role in plan.roles.items() if role.colocated_with and role.device_mapping}
        self._devices = {name: frozenset(role.device_mapping) for name, role in shared.items()} if enabled else {}
        self._tenants: dict[str, _Tenant] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    def moves(self, role: str) -> bool:
        """True if this role ever leaves its devices."""
        return role in self._devices

    def admit(self, cluster: Cluster, states: frozenset[StateKind]) -> None:
        """Take charge of a role that has just been built; it makes room for those that are built after it."""
        tenant = _Tenant(cluster, self._devices[cluster.name], states, set(states))
        self._tenants[cluster.name] = tenant
        self._timed(f"time/{cluster.name}/offload/total", tenant.offload, states)

    def dismiss(self, name: str) -> None:
        """A role has ended, and left its devices."""
        self._tenants.pop(name, None)

    def bring(self, needs: Mapping[str, frozenset[StateKind]]) -> None:
        """Have exactly what the next phase needs on the devices that it uses; first out, then in. A signal waits until
        all moves are made."""
        with ending.holding():
            self._bring(needs)

    def _bring(self, needs: Mapping[str, frozenset[StateKind]]) -> None:
        needed = {name: kinds for name, kinds in needs.items() if name in self._tenants}
        wanted: set[int] = set().union(*(self._tenants[name].devices for name in needed))
        for name, tenant in self._tenants.items():
            superfluous = tenant.resident - needed.get(name, frozenset())
            if superfluous and tenant.devices & wanted and not self._is_alone(tenant, needed):
                self._timed(f"time/{name}/offload/total", tenant.offload, superfluous)
        for name, kinds in needed.items():
            tenant = self._tenants[name]
            missing = (kinds & tenant.states) - tenant.resident
            if missing:
                self._timed(f"time/{name}/onload/total", tenant.onload, kinds & tenant.states)

    def _is_alone(self, tenant: _Tenant, needed: Mapping[str, frozenset[StateKind]]) -> bool:
        """True for a role that the phase needs and that shares its devices with no other one of the phase: what else it
        has there may stay."""
        others = [other for name in needed if (other := self._tenants[name]) is not tenant]
        return tenant.cluster.name in needed and not any(other.devices & tenant.devices for other in others)

    def _timed(self, name: str, move: Callable[[Collection[StateKind]], None], kinds: Collection[StateKind]) -> None:
        begin = time.perf_counter()
        move(kinds)
        self._seconds[name] += time.perf_counter() - begin

    def metrics(self) -> Metrics:
        """Seconds of the moves since the last call, by role and direction."""
        metrics: Metrics = {name: Mean(seconds) for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics
