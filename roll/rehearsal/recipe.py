"""A whole recipe: which role does what in which phase of a step, what is on a device meanwhile, and how long it takes.

Who is moved off a device between phases is decided by the class that does it in a run
(:class:`roll.pipelines.model_calls.Residency`), on clusters that only record the calls.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.pipelines import GENERATES
from roll.config.plan.plan import Plan
from roll.config.reading.errors import ConfigError, Problem
from roll.config.strategies.registry import backend_of, generation_strategies
from roll.datasets import DataError, PromptRow, SftRow
from roll.pipelines.files import load_tokenizer
from roll.pipelines.model_calls import GENERATION, TRAINING, WEIGHTS, Residency
from roll.rehearsal.catalog import GIB, KNOWN, RUN_BYTES, WORKER_BYTES, Hardware, find_config
from roll.rehearsal.formulas import EngineUse, ModelShape, engine_use, fused_bytes, model_shape
from roll.rehearsal.host import generation_seconds
from roll.rehearsal.roles import rehearse_role, role_task
from roll.rehearsal.roofline import PhaseTime, Traffic, generation_time, kernel_times, network_time, traffic
from roll.rehearsal.simulate import RoleRun
from roll.rehearsal.stand_ins import RecordingCluster
from roll.strategies.base import StateKind

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig

# Assumed of a process on a device: the driver's context, kernels and the buffers of NCCL.
CONTEXT_BYTES = int(0.75 * GIB)
ROWS_READ = 256  # rows of the data whose lengths are looked at
# Labels of what trainers hold between passes.
_STATES = {
    StateKind.MODEL_PARAMS: "parameters",
    StateKind.OTHER_PARAMS: "gradient buffers",
    StateKind.OPTIMIZER_STATES: "optimizer states",
}


@dataclass
class PhaseUse:
    """A device in one phase."""

    name: str
    parts: dict[tuple[str, str], float]  # bytes by role and kind

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass
class DeviceUse:
    """Devices with the same roles on them."""

    ids: tuple[int, ...]
    roles: tuple[str, ...]
    phases: list[PhaseUse]
    peak_without_offload: PhaseUse  # the fullest phase if nothing were offloaded between phases

    @property
    def peak(self) -> PhaseUse:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass
class Rehearsal:
    """Facts of a recipe before it runs."""

    name: str
    hardware: Hardware
    runs: dict[str, RoleRun]
    engines: dict[str, EngineUse]
    shapes: dict[str, ModelShape | None]
    devices: list[DeviceUse]
    host: dict[str, float]  # bytes of a worker's host memory by role and purpose
    problems: list[str]  # why it cannot run
    offloads: bool
    concurrent: tuple[str, ...]  # phases that other devices work on while the rest of the step goes on
    lengths: tuple[int, int] | None  # prompt and response of a mean sample; None: samples have their full length
    times: dict[str, PhaseTime] = field(default_factory=dict)  # by phase
    traffic: dict[str, list[Traffic]] = field(default_factory=dict)  # by phase, of one device
    flops: dict[str, float] = field(default_factory=dict)  # by phase, of one device
    cpu_seconds: float = 0.0  # of all processes in a step, where the device is this host's processor

    @property
    def fits(self) -> bool:
        return not self.problems and all(use.peak.total <= self.hardware.gpu.memory for use in self.devices)

    @property
    def peak(self) -> float:
        return max((use.peak.total for use in self.devices), default=0.0)

    @property
    def seconds(self) -> float:
        """Lower bound of a step: its phases one after another, those that are concurrent as one other row."""
        rows = {True: 0.0, False: 0.0}
        for name, time in self.times.items():
            rows[name in self.concurrent] += time.seconds
        return max(rows.values())


@dataclass(frozen=True)
class _Phase:
    name: str
    needs: Mapping[str, frozenset[StateKind]]
    works: Mapping[str, str]  # role and its kind of pass


def rehearse_recipe(
    loaded: LoadedConfig[Any],
    hardware: Hardware,
    given: Mapping[str, Path],
    say: Callable[[str], None] = lambda text: None,
    known: dict[Any, RoleRun] | None = None,
) -> Rehearsal:
    """Rehearse every role of a recipe, and put the phases of a step together; ConfigError for a model whose sizes are
    not known.

    Args:
        loaded: a configuration, as :func:`roll.config.loader.load_config` gives it.
        given: ``config.json`` by role; that of ``""`` for all roles without one.
        known: roles that were rehearsed before, by task and model; new ones are added.
    """
    plan: Plan = loaded.plan
    configs, known = _model_configs(plan, given), {} if known is None else known
    runs: dict[str, RoleRun] = {}
    engines: dict[str, EngineUse] = {}
    shapes = {name: model_shape(config) for name, config in configs.items()}
    lengths = None if hardware.clock is None else _mean_lengths(loaded)
    for name, role in plan.roles.items():
        if name not in configs:
            continue
        # `hf_infer` of a role that computes log-probs is a plain model, not an engine; `vllm` of such a role is one.
        pipeline_task = loaded.pipeline.task_of(role.key, role.section)
        is_plain = pipeline_task is not GENERATES and backend_of(role.strategy_name or "").computes is not None
        computes = role.strategy_name not in pipeline_task.able() or is_plain
        if role.strategy_name in generation_strategies() and not computes:
            shape = shapes[name]
            if shape is None:
                rule = "the arithmetic of engines knows decoders with attention and gated MLPs or experts only"
                raise ConfigError([Problem(f"{role.key}.model_args.model_name_or_path", role.model_path, rule)])
            engines[name] = engine_use(role, shape, hardware.gpu)
            continue
        task = role_task(loaded, name, hardware, lengths, shapes[name])
        key = (repr(task), json.dumps(configs[name], sort_keys=True))
        if key not in known:
            say(f"rehearsing {name} ({role.strategy_name}, {role.world_size} ranks)")
            known[key] = rehearse_role(role, task, configs[name])
        runs[name] = known[key]
    step = _Step(loaded, runs, engines)
    on_devices = hardware.clock is None
    offloads = loaded.config.is_offload_states is not False and on_devices
    report = Rehearsal(
        name=plan.exp_name,
        hardware=hardware,
        runs=runs,
        engines=engines,
        shapes=shapes,
        devices=step.devices(offloads) if on_devices else [step.on_host(shapes)],
        host=step.host() if on_devices else {},
        problems=[use.problem for use in engines.values() if use.problem],
        offloads=offloads,
        concurrent=step.concurrent(),
        lengths=lengths,
    )
    for phase in step.phases:
        step.add_times(report, phase, configs)
    return report


def _model_configs(plan: Plan, given: Mapping[str, Path]) -> dict[str, Mapping[str, Any]]:
    found, problems = {}, []
    for name, role in plan.roles.items():
        if role.strategy_name is None or backend_of(role.strategy_name).is_remote:
            continue
        config = find_config(role.model_path, given.get(name) or given.get(""))
        if config is None:
            rule = f"is not on this machine and not one of the known sizes ({', '.join(KNOWN)}); give its config.json "
            rule += f"by --model-config [{name}=]FILE"
            problems.append(Problem(f"{role.key}.model_args.model_name_or_path", role.model_path, rule))
        else:
            found[name] = config
    if problems:
        raise ConfigError(problems)
    return found


def _mean_lengths(loaded: LoadedConfig[Any]) -> tuple[int, int] | None:
    """Tokens of a mean row's prompt and response; what is generated counts in full. None: the data or the
    tokenizer is not here."""
    train = loaded.pipeline.readable_sets(loaded).get("train")
    if train is None:
        return None
    arguments = loaded.plan.roles[loaded.pipeline.reading_role()].section.model_args
    try:
        rows = train.read(load_tokenizer(arguments.model_name_or_path, arguments.trust_remote_code))
    except (DataError, OSError, ValueError):  # without the tokenizer, too, lengths are unknown
        return None
    found: list[tuple[int, int]] = []
    for row in rows[:ROWS_READ]:
        if isinstance(row, PromptRow):
            found.append((len(row.token_ids), getattr(loaded.plan, "max_new_tokens", 1)))
        elif isinstance(row, SftRow):
            found.append((len(row.response_mask) - sum(row.response_mask), sum(row.response_mask)))
        else:
            found += [(len(row.prompt_ids), len(tokens)) for tokens in row.responses]
    prompts, responses = (max(1, round(sum(counts) / len(found))) for counts in zip(*found, strict=True))
    return prompts, responses


class _Step:
    """The phases of a step, and what its roles hold and do in them."""

    def __init__(self, loaded: Any, runs: dict[str, RoleRun], engines: dict[str, EngineUse]) -> None:
        self.config, self.plan, self.pipeline = loaded.config, loaded.plan, loaded.pipeline
        self.runs, self.engines = runs, engines
        self.holders = [name for name in self.plan.roles if name in runs or name in engines]
        self.phases = list(self._phases())

    def _phases(self) -> Iterator[_Phase]:
        """In their order, as :mod:`roll.pipelines.policy_pipeline` brings states for them."""
        plan, runs, engines = self.plan, self.runs, self.engines
        roles = {name: plan.roles[name] for name in engines}
        tasks = {name: self.pipeline.task_of(role.key, role.section) for name, role in roles.items()}
        judges = [name for name, task in tasks.items() if name != "actor_infer" and task is GENERATES]
        if "actor_infer" in engines:
            needs = {"actor_train": WEIGHTS, "actor_infer": WEIGHTS}
            yield _Phase("weight update", needs, {"actor_train": "send"})
            scorers = [name for name in runs if name == "reward_model"]
            generating = dict.fromkeys(("actor_infer", *judges), GENERATION) | dict.fromkeys(scorers, WEIGHTS)
            yield _Phase("generation", generating, dict.fromkeys(scorers, "forward"))
        for name, task in tasks.items():
            if task is not GENERATES:
                yield _Phase(f"forward of {name}", {name: GENERATION}, {})
        learners = sorted((name for name in plan.training if name in runs), key=lambda name: name == "actor_train")
        others = [name for name in runs if name not in plan.training and name != "reward_model"]
        for name in (*others, *learners[::-1]):
            if "forward" in runs[name].works:
                yield _Phase(f"forward of {name}", {name: WEIGHTS}, {name: "forward"})
        for name in learners:
            yield _Phase(f"update of {name}", {name: TRAINING}, {name: "train"})

    def concurrent(self) -> tuple[str, ...]:
        """Phases that other devices work on while the rest of the step goes on."""
        is_async = getattr(self.plan, "is_async", False)
        runs_ahead = is_async or getattr(self.plan, "frozen_runs_ahead", False)
        frozen = next((f"forward of {name}" for name in self.plan.roles if name not in self.plan.training), "")
        ahead = "generation" if is_async else frozen
        return (ahead,) if runs_ahead and ahead in [phase.name for phase in self.phases] else ()

    def devices(self, offloads: bool) -> list[DeviceUse]:
        on = {name: self.plan.roles[name].device_mapping for name in self.holders}
        groups: dict[tuple[str, ...], list[int]] = {}
        for device in sorted({device for mapping in on.values() for device in mapping}):
            groups.setdefault(tuple(name for name in on if device in on[name]), []).append(device)
        present = {moved: self._residents(moved) for moved in (True, False)}
        uses = []
        for names, ids in groups.items():
            pages = {
                moved: [self._use(phase, names, states) for phase, states in zip(self.phases, found, strict=True)]
                for moved, found in present.items()
            }
            fullest = max(pages[False], key=lambda phase: phase.total)
            uses.append(DeviceUse(tuple(ids), names, pages[offloads], fullest))
        return uses

    def on_host(self, shapes: Mapping[str, ModelShape | None]) -> DeviceUse:
        """The memory of all processes of the run, which stay what they are between phases."""
        roles = self.plan.roles
        phases = []
        for phase in self.phases:
            of_a_rank = {name: {"process": float(WORKER_BYTES)} for name in roles}
            for name, use in self.engines.items():
                shape = shapes[name]
                assert shape is not None
                of_a_rank[name] |= {"weights": use.weights, "KV cache": use.cache, "workspace": use.workspace}
                of_a_rank[name]["kept by malloc"] = fused_bytes(roles[name], shape)
            for name, run in self.runs.items():
                held, work = of_a_rank[name], run.works.get(phase.works.get(name, ""))
                held |= {label: run.states.get(state, 0) for state, label in _STATES.items()}
                held["kept by malloc"] = run.kept if work is None else work.kept
                for kind, size in () if work is None else work.working.items():
                    held[str(kind)] = held.get(str(kind), 0) + size
            parts: dict[tuple[str, str], float] = {("run", "driver and Ray"): RUN_BYTES}
            for name, role in roles.items():
                parts |= {(name, kind): size * role.world_size for kind, size in of_a_rank[name].items() if size}
            phases.append(PhaseUse(phase.name, parts))
        return DeviceUse((0,), tuple(self.holders), phases, max(phases, key=lambda phase: phase.total))

    def _residents(self, offloads: bool) -> list[dict[str, set[StateKind]]]:
        """States on the devices by phase and role, in the second of two steps: the first leaves some there."""
        residency, clusters = Residency(self.plan, enabled=offloads), {}
        for name in (*self.engines, *self.runs):
            states = TRAINING if name in self.plan.training else GENERATION if name in self.engines else WEIGHTS
            clusters[name] = cluster = RecordingCluster(self.plan.roles[name], states)
            residency.admit(cluster, states)  # type: ignore[arg-type]
        found = []
        for phase in (*self.phases, *self.phases):
            residency.bring(phase.needs)
            found.append({name: set(cluster.resident) for name, cluster in clusters.items()})
        return found[len(self.phases) :]

    def _use(self, phase: _Phase, names: tuple[str, ...], resident: Mapping[str, set[StateKind]]) -> PhaseUse:
        parts: dict[tuple[str, str], float] = defaultdict(float)
        for name in names:
            there = resident[name]
            parts[name, "context"] = CONTEXT_BYTES
            if name in self.engines:
                use = self.engines[name]
                parts[name, "weights"] = use.weights * (StateKind.MODEL_PARAMS in there)
                parts[name, "KV cache"] = use.cache * (StateKind.KV_CACHE in there)
                parts[name, "workspace"] = use.workspace * (StateKind.KV_CACHE in there)
                sender = self.runs.get("actor_train")
                if phase.name == "weight update" and name == "actor_infer" and sender and "send" in sender.works:
                    # An engine copies a bucket to its device before it takes it over.
                    parts[name, "receive bucket"] = max(sender.works["send"].working.values(), default=0) / 2
                continue
            run = self.runs[name]
            for state, label in _STATES.items():
                parts[name, label] = run.states.get(state, 0) * (state in there)
            work = run.works.get(phase.works.get(name, ""))
            for kind, size in () if work is None else work.working.items():
                parts[name, "send buckets" if phase.works[name] == "send" else str(kind)] += size
        return PhaseUse(phase.name, {key: size for key, size in parts.items() if size})

    def host(self) -> dict[str, float]:
        """Host memory of a worker: what is moved there between phases, what stays there, and columns of log-probs."""
        found: dict[str, float] = {}
        offloads = self.config.is_offload_states is not False
        for name, run in self.runs.items():
            role = self.plan.roles[name]
            if run.host:
                found[f"{name}: states"] = run.host
            if role.colocated_with and offloads:
                found[f"{name}: offloaded between phases"] = sum(run.states.values())
            if "forward" in run.works:
                samples = next(iter(self.plan.training.values())).samples_per_step
                found[f"{name}: log-prob columns"] = -(-samples // role.dp_size) * role.sequence_length * 4.0
        for name, use in self.engines.items():
            if self.plan.roles[name].colocated_with and offloads:
                found[f"{name}: offloaded between phases"] = use.weights
        return found

    def add_times(self, report: Rehearsal, phase: _Phase, configs: Mapping[str, Mapping[str, Any]]) -> None:
        plan, gpu = self.plan, report.hardware.gpu
        compute = memory = flops = 0.0
        flows: list[Traffic] = []
        for name, kind in phase.works.items():
            work = self.runs[name].works[kind]
            bound, waiting, spent = kernel_times(work.operations, report.hardware)
            report.cpu_seconds += spent * plan.roles[name].world_size
            compute, memory, flops = compute + bound, memory + waiting, flops + work.flops
            flows += traffic(work.collectives, plan.roles[name].device_mapping, report.hardware.per_node)
        if phase.name == "generation":
            role, shape = plan.roles["actor_infer"], report.shapes["actor_infer"]
            assert shape is not None
            batch, use = (plan.samples_per_step, plan.group_size), self.engines["actor_infer"]
            lengths = report.lengths or (plan.sequence_length - plan.max_new_tokens, plan.max_new_tokens)
            arithmetic, moving = generation_time(role, shape, use, gpu, *batch, *lengths)
            flops += arithmetic * (gpu.half if role.section.model_args.dtype != "fp32" else gpu.single)
            if report.hardware.clock is not None:
                own = -(-plan.samples_per_step // role.dp_size)
                sizes = own, plan.group_size, lengths[0], lengths[1], use.running
                took, spent = generation_seconds(role, configs["actor_infer"], *sizes)
                arithmetic, moving = took, 0.0
                report.cpu_seconds += spent * role.dp_size
            compute += arithmetic if arithmetic >= moving else 0.0
            memory += moving if arithmetic < moving else 0.0
        report.times[phase.name] = PhaseTime(compute, memory, network_time(flows, report.hardware))
        report.traffic[phase.name] = flows
        report.flops[phase.name] = flops
