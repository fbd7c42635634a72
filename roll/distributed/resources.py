"""Devices by their logical ids: which node and which local device each worker of a role gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from roll.config.roles import WorkerConfig
from roll.distributed.ray_node import NODE_RANK_LABEL, SLOT_RESOURCE, ray_lost

_ACCELERATORS = ("GPU", "NPU")


@dataclass(frozen=True)
class Placement:
    """The place of one worker."""

    rank: int
    bundle: int  # index of the node's bundle in the placement group
    device_ids: tuple[int, ...]
    local_devices: tuple[int, ...] | None
    """Devices of its node that the worker shall see; None where the cluster has no accelerators to hide."""


class ResourceManager:
    """Reserves the devices of a run and hands them out; roles whose lists overlap share devices.

    Device ids are logical: id ``i`` is device ``i % num_devices_per_node`` of node ``i // num_devices_per_node``. On
    nodes without accelerators ids are slots on the CPU.
    """

    def __init__(
        self,
        num_devices_per_node: int,
        num_nodes: int = 1,
        timeout: float = 60.0,
        system_envs: Mapping[str, str] | None = None,
    ) -> None:
        """Reserve ``num_nodes`` nodes with ``num_devices_per_node`` devices each. Ray must be running. ``system_envs``:
        variables that each worker gets, besides those of its role. Raises ``ValueError``: no such nodes in the cluster,
        or they are taken for longer than ``timeout`` seconds."""
        assert num_devices_per_node >= 1 and num_nodes >= 1, "a run has a device"
        self.num_devices_per_node = num_devices_per_node
        self.num_nodes = num_nodes
        self.system_envs = dict(system_envs or {})
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._resource = _device_resource(nodes, num_devices_per_node, num_nodes)
        self._has_accelerators = self._resource in _ACCELERATORS
        # On a Ray without slots a CPU a node only marks the place: demanding one per device would fail on small hosts.
        amount = 1 if self._resource == "CPU" else num_devices_per_node
        # STRICT_SPREAD: two bundles on one node would be taken for two nodes with devices of their own.
        self.placement_group = placement_group([{self._resource: amount}] * num_nodes, strategy="STRICT_SPREAD")
        if not self.placement_group.wait(timeout):
            remove_placement_group(self.placement_group)
            raise ValueError(
                f"{num_nodes} node(s) with {amount} free {self._resource} were not to be had within {timeout:g} s; "
                f"free in the cluster: {ray.available_resources().get(self._resource, 0):g}. Another run may hold "
                "them: wait for it, or lower num_gpus_per_node"
            )
        # By node ranks (then addresses), so that ids mean the same nodes in every run.
        places = {
            node["NodeID"]: (int(node.get("Labels", {}).get(NODE_RANK_LABEL, 1 << 30)), node["NodeManagerAddress"])
            for node in nodes
        }
        located = placement_group_table(self.placement_group)["bundles_to_node_id"]
        self._bundles = [int(bundle) for bundle in sorted(located, key=lambda bundle: places[located[bundle]])]

    def place(self, name: str, role: WorkerConfig) -> list[Placement]:
        """One placement a worker of the role, by rank.

        ``device_mapping`` is divided, in order, into groups of ``num_gpus_per_worker``, one worker a group. A role
        without it gets ``world_size`` (default 1) workers without devices, round-robin over the nodes. Raises
        ``ValueError``: an id that no device has, one listed twice, a list that does not divide into groups, or a group
        across two nodes.
        """
        if role.device_mapping is None:
            hidden, bundles, ranks = () if self._has_accelerators else None, self._bundles, range(role.world_size or 1)
            return [Placement(rank, bundles[rank % self.num_nodes], (), hidden) for rank in ranks]
        mapping, size, per_node = role.device_mapping, role.num_gpus_per_worker, self.num_devices_per_node
        groups = [tuple(mapping[start : start + size]) for start in range(0, len(mapping), size)]
        nodes = [{device // per_node for device in group} for group in groups]
        # The check of a configuration names each of these mistakes; a list of one's own code is refused by the rule.
        is_whole = mapping and len(groups[-1]) == size and len(set(mapping)) == len(mapping)
        if not is_whole or not all(len(own) == 1 and own <= {*range(self.num_nodes)} for own in nodes):
            raise ValueError(
                f"{name}.device_mapping: {mapping} must name ids of 0 to {per_node * self.num_nodes - 1}, each once, "
                f"{size} for each worker, which are on one node of num_gpus_per_node={per_node}"
            )
        placements = []
        for rank, (group, (node,)) in enumerate(zip(groups, nodes, strict=True)):
            local = tuple(device % per_node for device in group) if self._has_accelerators else None
            placements.append(Placement(rank, self._bundles[node], group, local))
        return placements

    def close(self) -> None:
        """Give the devices back to Ray."""
        if ray_lost() is None:
            remove_placement_group(self.placement_group)


def _device_resource(nodes: list[dict[str, Any]], per_node: int, num_nodes: int) -> str:
    """The resource that counts devices: accelerators where any node has them, else slots, else (a Ray that this
    project did not start) one CPU a node."""
    for resource in (*_ACCELERATORS, SLOT_RESOURCE):
        counts = sorted((int(node["Resources"].get(resource, 0)) for node in nodes), reverse=True)
        if not counts or counts[0] == 0:
            continue
        enough = [count for count in counts if count >= per_node]
        if len(enough) < num_nodes:
            raise ValueError(
                f"num_gpus_per_node={per_node} on {num_nodes} node(s) is more than there is: the nodes have {counts} "
                f"{resource}; set num_gpus_per_node to at most {counts[min(num_nodes, len(counts)) - 1]}"
                + (f" and device ids to fewer than {num_nodes} nodes" if num_nodes > len(counts) else "")
                + ("" if resource == SLOT_RESOURCE else "; or leave them alone and run on CPUs: ROLL_PLATFORM=cpu")
            )
        return resource
    if len(nodes) < num_nodes:
        raise ValueError(f"the run needs {num_nodes} node(s), the Ray cluster has {len(nodes)}")
    return "CPU"
