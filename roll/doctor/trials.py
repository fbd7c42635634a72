"""Findings (a value, the rule that judges it, and what to do about it), and those that take a trial: collectives, the
sandbox and a run.

Each trial is a process of its own (``python -m roll.doctor.trials MODULE:FUNCTION ...``) with a deadline: a driver that
hangs, a library that crashes and a network that drops packets end the trial and nothing else. A trial writes a line of
JSON for each thing that it has done, so that one which does not end is known by the last thing that it did. Those of
the devices are in :mod:`.devices`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import roll
from roll.config.loader import recipes_root
from roll.distributed.guard import kill_tree
from roll.platforms import current_platform


class Severity(IntEnum):
    """Gravity of a finding; the exit status follows the gravest."""

    OK = 0
    NOTE = 1  # something optional is not there
    WARNING = 2  # runs work, but slower, with less, or less safely than they could
    ERROR = 3  # no run works here


EXIT = {Severity.OK: 0, Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}  # exit status, by the gravest


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str = field(default="", kw_only=True)  # part of the report, which `command.examine` fills in
    what: str
    value: str
    rule: str  # the condition that `value` was held against
    severity: Severity = Severity.OK
    remedy: str = ""  # the remedy where the rule is broken
    data: dict[str, Any] | None = None  # figures, for programs


def judge(
    what: str,
    value: str,
    rule: str,
    holds: bool,
    remedy: str,
    severity: Severity = Severity.WARNING,
    data: dict[str, Any] | None = None,
) -> Finding:
    """The finding of a rule that ``holds``, or that is broken with ``severity`` and asks for ``remedy``."""
    return Finding(what, value, rule, Severity.OK if holds else severity, "" if holds else remedy, data)


def gravest(findings: Sequence[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)


NODE_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RAY_ADDRESS", "DASHBOARD_PORT")
"""Of a run on several nodes; a trial is about this host alone."""
MODULE = "roll.doctor.trials"  # the program that runs a trial
Command = tuple[Callable[..., None], *tuple[str, ...]]  # A trial: a function of a module, and its arguments
_ROOT = str(Path(roll.__file__).parents[1])
_LAST_LINES = 3
_KILLED_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """The end of a trial's process."""

    words: list[dict[str, Any]]  # its output
    error: str  # empty: it ended well

    @property
    def findings(self) -> list[Finding]:
        """Those that it has judged itself, by :func:`found`."""
        told = [word["finding"] for word in self.words if "finding" in word]
        return [Finding(**{**finding, "severity": Severity(finding["severity"])}) for finding in told]


def trials(commands: Sequence[Command], deadline: float, environ: Mapping[str, str] | None = None) -> list[Outcome]:
    """Run trials at the same time, as the ranks of a collective; those that are late are killed with their children."""
    kept = {name: value for name, value in os.environ.items() if name not in NODE_VARIABLES}
    path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH", ""))))
    environment = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environ or {})}

    processes: list[subprocess.Popen[bytes]] = []

    def run(command: Command) -> Outcome:
        function, *arguments = command
        # Files: a pipe would have no end while a process that the trial has left behind holds it.
        with (
            tempfile.TemporaryFile("w+", errors="replace") as said,
            tempfile.TemporaryFile("w+", errors="replace") as log,
        ):
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, f"{function.__module__}:{function.__name__}", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=log,
                start_new_session=True,
            )
            processes.append(process)
            late = ""
            try:
                process.wait(deadline)
            except subprocess.TimeoutExpired:
                late = f"no end within {deadline:g} s; it hung"
                kill_tree(process.pid)
                with suppress(subprocess.TimeoutExpired):  # the kernel keeps one that waits for a driver
                    process.wait(_KILLED_SECONDS)
            said.seek(0)
            log.seek(0)
            output, errors = said.read(), log.read()
        words = [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
        last = f" after {words[-1]['did']!r}" if words else ""
        if late or not process.returncode:
            return Outcome(words, late and late + last)
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return Outcome(words, " | ".join(lines[-_LAST_LINES:]) or f"ended with status {process.returncode}{last}")

    with ThreadPoolExecutor(len(commands)) as pool:
        try:
            return list(pool.map(run, commands))
        except KeyboardInterrupt:  # which sessions of their own do not get
            for process in processes:
                kill_tree(process.pid)
            raise


def did(what: str, **figures: object) -> None:
    """Say that something is done."""
    sys.stdout.write(json.dumps({"did": what, **figures}) + "\n")
    sys.stdout.flush()


def found(finding: Finding) -> None:
    """Say that something is done, and what was found."""
    did(finding.what, finding=asdict(finding))


def failures(
    what: str, rule: str, remedy: str, outcomes: Sequence[Outcome], names: Sequence[str] = ("",)
) -> Iterator[Finding]:
    """An error if not all processes of a trial, which ``names`` tell apart, have ended well."""
    named = zip(names, outcomes, strict=True)
    if errors := [f"{name}: {outcome.error}" if name else outcome.error for name, outcome in named if outcome.error]:
        yield Finding(what, "; ".join(errors), rule, Severity.ERROR, remedy)


# Collectives

COLLECTIVE_SECONDS = 60.0
LEAST_NCCL = 5e9  # bytes a second, below what two devices exchange through host memory
_BYTES = {"gloo": 16 << 20}
_DEVICE_BYTES = 256 << 20
_REPEATS = 5


def try_collectives(ranks: int) -> Iterator[Finding]:
    """All-reduce, all-gather, all-to-all and broadcast among local ranks: right values, and bytes a second.

    NCCL takes one rank a device. With a single device it has a group of one, and gloo tries two ranks on the device.
    """
    here = current_platform()
    on_cpu = here.name == "cpu"
    backend, world = here.collective_backend, ranks if on_cpu else min(ranks, here.device_count())
    groups = [(backend, world), *([("gloo", 2)] if world == 1 and not on_cpu else [])]
    with tempfile.TemporaryDirectory(prefix="roll-doctor-") as folder:
        commands: list[Command] = [
            (collectives, backend, str(rank), str(world), f"{folder}/{backend}")
            for backend, world in groups
            for rank in range(world)
        ]
        outcomes = trials(commands, COLLECTIVE_SECONDS, {"GLOO_SOCKET_IFNAME": "lo"})
    for backend, world in groups:
        own, outcomes = outcomes[:world], outcomes[world:]
        yield from _judge_collectives(backend, world, own)


def _judge_collectives(backend: str, world: int, outcomes: Sequence[Outcome]) -> Iterator[Finding]:
    rule, remedy = "the values are right, and every rank ends", "see that 127.0.0.1 is up and not filtered"
    if backend != "gloo":
        remedy = (
            "NCCL_DEBUG=INFO says where it stands; NCCL_P2P_DISABLE=1 leaves links between devices aside, and "
            "containers need --shm-size and --ipc=host"
        )
    failed = list(failures(f"{backend}, {world} ranks", rule, remedy, outcomes, [f"rank {r}" for r in range(world)]))
    yield from failed
    if failed:
        return
    for words in zip(*([word for word in outcome.words if "rate" in word] for outcome in outcomes), strict=True):
        slowest, size = min(word["rate"] for word in words), words[0]["bytes"]
        value = f"{slowest / 1e9:.2f} GB/s a rank ({backend}, {world} ranks, {size >> 20} MiB)"
        data = {"bytes_per_second": slowest, "ranks": world, "bytes": size, "backend": backend}
        if backend == "gloo" or world == 1:
            yield Finding(words[0]["did"], value, rule, data=data)
            continue
        fast = f"{rule}, at {LEAST_NCCL / 1e9:g} GB/s or more: less goes through sockets or a narrow link"
        slow = "NCCL_DEBUG=INFO says by which way; unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE; nvidia-smi topo -m"
        yield judge(words[0]["did"], value, fast, slowest >= LEAST_NCCL, slow, data=data)


def collectives(backend: str, rank_text: str, world_text: str, store: str) -> None:
    """One rank. The rate is what a rank sends and receives over its link in an optimal ring, as nccl-tests count it."""
    import torch
    import torch.distributed as dist

    here, rank, world = current_platform(), int(rank_text), int(world_text)
    index = rank % here.device_count()
    here.set_device(index)
    target = here.device(index)
    count = _BYTES.get(backend, _DEVICE_BYTES) // 4 // world * world
    own, received = (torch.empty(count, device=target) for _ in range(2))
    did("allocated")
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    did("joined")
    others = torch.arange(1, world + 1, device=target, dtype=torch.float32).unsqueeze(1)
    part, from_each = (world - 1) / world, lambda: received.view(world, -1) == others
    kinds: dict[str, tuple[float, Callable[[], object], Callable[[], torch.Tensor]]] = {
        "all-reduce": (2 * part, lambda: dist.all_reduce(own), lambda: own == others.sum()),
        "broadcast": (1.0, lambda: dist.broadcast(own, world - 1), lambda: own == world),
        "all-gather": (part, lambda: dist.all_gather_into_tensor(received, own[: count // world]), from_each),
        "all-to-all": (part, lambda: dist.all_to_all_single(received, own), from_each),
    }
    if backend == "gloo" and here.name != "cpu":  # which is documented for these two of tensors on a device
        kinds = {name: kinds[name] for name in ("all-reduce", "broadcast")}
    for name, (share, run, are_right) in kinds.items():
        own.fill_(rank + 1.0)
        received.zero_()
        run()
        if not are_right().all():
            raise RuntimeError(f"{name} gave wrong values")
        dist.barrier()
        here.synchronize()
        began = time.perf_counter()
        for _ in range(_REPEATS):
            run()
        here.synchronize()
        seconds = time.perf_counter() - began
        did(name, rate=(share if world > 1 else 1.0) * own.nbytes * _REPEATS / seconds, bytes=own.nbytes)
    dist.destroy_process_group()


# The sandbox

SANDBOX_SECONDS = 90.0


def try_sandbox() -> Iterator[Finding]:
    """Attack the sandbox of model-written code, as each reward worker does at its start."""
    from roll.rewards.sandbox.protections import CONSEQUENCES, PROMISED

    (outcome,) = trials([(sandbox,)], SANDBOX_SECONDS)
    word = outcome.words[-1] if outcome.words else {"given": [], "missing": [], "means": []}
    broken = [name for name in word["missing"] if name in PROMISED]
    value = outcome.error or f"{', '.join(word['given'])} (by {', '.join(word['means']) or 'nothing'})"
    if not outcome.error and word["missing"]:
        value += f"; not {', '.join(word['missing'])}"
    yield judge(
        "isolation",
        value,
        f"gives {', '.join(PROMISED)}: without them code_sandbox refuses to run model-written code",
        not outcome.error and not broken,
        "only recipes with code rewards or a Python tool need it: run them where namespaces or Landlock are permitted "
        "(docs/code-rewards.md lists hosts) or on another host (code_url)"
        + (f"; here programs {'; '.join(CONSEQUENCES[name] for name in broken)}" if broken else ""),
        data=None if outcome.error else word,
    )


def sandbox() -> None:
    from roll.rewards.sandbox.client import Sandbox

    with closing(Sandbox()) as box:
        report = box.start()
    given = [name for name, held in report.given.items() if held]
    did("attacked", given=given, missing=report.missing, means=list(report.means))


# A run

RUN_SECONDS = 150.0
LOG_PROB_TOLERANCE = 1e-3  # mean difference of the log-probs of engine and trainer, both in float32, in nats


def try_run() -> Iterator[Finding]:
    """Two steps of the tiny recipe, from an untrained model."""
    with tempfile.TemporaryDirectory(prefix="roll-doctor-", ignore_cleanup_errors=True) as folder:
        outcomes = trials([(two_steps, folder)], RUN_SECONDS)
    yield from outcomes[0].findings
    remedy = "if all above is in order, run it by itself and see its logs: roll run tiny/rlvr_config max_steps=2"
    yield from failures("two steps", "end", remedy, outcomes)


def two_steps(folder: str) -> None:
    from roll.cli import main
    from roll.tracking import METRICS_NAME, read_metrics

    here, recipe = current_platform(), recipes_root() / "examples" / "tiny"
    devices = 2 if here.name == "cpu" else min(2, here.device_count())
    sys.path.insert(0, str(recipe))
    made = importlib.import_module("prepare").prepare(Path(folder), [0])
    did("wrote the data and a model")
    settings = {
        "num_gpus_per_node": devices,
        "pretrain": made.model_folder(0),
        "actor_train.data_args.file_name": f"[{made.train_file}]",
        "validation.data_args.file_name": f"[{made.validation_file}]",
        "actor_train.training_args.per_device_train_batch_size": 256 // devices,
        "actor_train.training_args.warmup_steps": 0,
        "actor_train.training_args.save_hf_model": "false",
        "entropy_loss_coef": 0.01,  # a gradient, though an untrained model's answers are all wrong
        "max_steps": 2,
        "eval_steps": 0,
        "output_dir": f"{folder}/output",
        "track_with": "[jsonl]",
        **{
            f"{role}.device_mapping": f"list(range(0,{devices}))"
            for role in ("actor_train", "actor_infer", "reference")
        },
    }
    began = time.time()
    with redirect_stdout(sys.stderr):
        status = main(["run", str(recipe / "rlvr_config.yaml"), *(f"{key}={value}" for key, value in settings.items())])
    if status:
        sys.exit(f"the run ended with status {status}")
    rows = read_metrics(Path(folder) / "output" / "logs" / METRICS_NAME)
    steps = [row["time/step_total"] for row in rows]
    if len(steps) != 2 or not all(0 < row["actor/grad_norm"] < math.inf for row in rows):
        sys.exit(f"the run made {len(steps)} steps, with gradients of norm {[row['actor/grad_norm'] for row in rows]}")
    start, differ = rows[0]["time"] - began - steps[0], max(row["actor/train_infer_log_diff_abs_mean"] for row in rows)
    where, times = ("one device", "two devices")[devices - 1], " and ".join(f"{seconds:.1f}" for seconds in steps)
    value = f"{where}: start {start:.1f} s, steps {times} s; differ by {differ:.1g}"
    rule = f"log-probs of engine and trainer differ by {LOG_PROB_TOLERANCE:g} at most"
    remedy = "roll bisect-logprobs says in which layer they part"
    data = {"devices": devices, "start_seconds": start, "step_seconds": steps, "difference": differ}
    found(judge("two steps", value, rule, differ <= LOG_PROB_TOLERANCE, remedy, Severity.ERROR, data))


if __name__ == "__main__":
    pkgutil.resolve_name(sys.argv[1])(*sys.argv[2:])
