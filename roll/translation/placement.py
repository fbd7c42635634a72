"""Devices: nodes times devices of a node, shared or apart, as the lists that ``device_mapping`` takes."""

from __future__ import annotations

from roll.translation.draft import Draft


def device_count(draft: Draft, role: str) -> int:
    per_node = draft.get(f"gpus.{role}", "gpus", default=1)
    return int(per_node) * int(draft.get(f"nodes.{role}", "nodes", default=1))


def put_devices(draft: Draft) -> None:
    """``device_mapping`` of every role, as lists that start at 0 within ``CUDA_VISIBLE_DEVICES``."""
    own = [f"{name}{suffix}" for name in ("gpus", "nodes") for suffix in ("", ".actor", ".reference", ".critic")]
    because = [*own, "engines", "colocate", "colocate_reference", "engine_gpus", "engine_nodes"]
    if not draft.states(*because):
        return
    count, next_free = device_count(draft, "actor"), device_count(draft, "actor")
    draft.put("num_gpus_per_node", int(draft.get("gpus.actor", "gpus", default=count)), "gpus", "gpus.actor")
    draft.put("actor_train.device_mapping", devices(0, count), "gpus", "nodes", "gpus.actor", "nodes.actor")
    together = draft.get("colocate", default=True)
    for role, section in draft.sections()[1:]:
        size, shares = device_count(draft, role), together
        if role == "reference" and not together:
            shares = draft.get("colocate_reference", default=True)
        start = 0 if shares else next_free
        next_free += 0 if shares else size
        draft.put(f"{section}.device_mapping", devices(start, size), "gpus", "nodes", f"gpus.{role}", f"nodes.{role}")
    put_engine_devices(draft, count, together, next_free)
    visible = draft.get("visible")
    names = [name for name in str(visible).split(",") if name.strip()] if visible is not None else []
    per_node = int(draft.get("gpus.actor", "gpus", default=count))
    if names and len(names) < per_node:
        rule = f"names {len(names)} devices, but a node is to have {per_node}"
        draft.problems.add("CUDA_VISIBLE_DEVICES", visible, rule)


def put_engine_devices(draft: Draft, trainers: int, together: bool, next_free: int) -> None:
    """Engines on the trainer's devices, or on those behind all others."""
    size, engines = draft.get("engine_tensor", default=1), draft.get("engines")
    wanted = trainers if engines is None else engines * size
    if draft.states("engine_gpus"):
        wanted = int(draft.facts["engine_gpus"]) * int(draft.get("engine_nodes", default=1))
    elif not together and engines is None:
        draft.problems.missing("rollout.n_gpus_per_node", "is needed: engines have devices of their own", 1)
        return
    if together and wanted != trainers:
        rule = f"times {size} tensor-parallel ranks take {wanted} devices, but the trainer they share has {trainers}"
        draft.problems.add("generator.num_inference_engines", engines, rule, max(1, trainers // size))
    elif wanted % size:
        rule = f"does not divide the {wanted} devices of the engines"
        draft.problems.add("actor_rollout_ref.rollout.tensor_model_parallel_size", size, rule, 1)
    else:
        mapping = devices(0 if together else next_free, wanted)
        draft.put(
            "actor_infer.device_mapping", mapping, "gpus", "nodes", "engines", "colocate", "engine_gpus", "engine_nodes"
        )
        draft.facts["devices"] = next_free if together else next_free + wanted


def devices(start: int, count: int) -> str:
    return f"list(range({start},{start + count}))"


def put_run_ahead(draft: Draft) -> None:
    """Generation one step ahead of training, on devices of its own."""
    if draft.facts.get("one_step_off"):
        draft.put("async_generation_ratio", 1, "colocate")
        draft.put("partial_rollout", False, "colocate")
        draft.put("enable_old_logprobs_recompute", True, "colocate")
        draft.remark(["colocate"], "their program generates a batch while it trains on the one before")
