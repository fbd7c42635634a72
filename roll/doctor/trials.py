"""Findings (a value, the rule that judges it, and what to do about it), and those that take a trial: collectives and
the sandbox.

Each trial is a process of its own (``python -m roll.doctor.trials NAME ...``) with a deadline: a driver that hangs, a
library that crashes and a network that drops packets end the trial and nothing else. A trial writes a line of JSON for
each thing that it has done, so that one which does not end is known by the last thing that it did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import roll
from roll.distributed.guard import kill_tree
from roll.platforms import current_platform


class Severity(IntEnum):
    """Gravity of a finding; the exit status follows the gravest."""

    OK = 0
    NOTE = 1
    """Something optional is not there."""
    WARNING = 2
    """Runs work, but slower, with less, or less safely than they could."""
    ERROR = 3
    """No run works here."""


EXIT = {Severity.OK: 0, Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}
"""Exit status by the gravest finding."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str = field(default="", kw_only=True)
    """Part of the report; :func:`roll.doctor.command.examine` fills it in."""
    what: str
    value: str
    rule: str
    """The condition that ``value`` was held against."""
    severity: Severity = Severity.OK
    remedy: str = ""
    """The remedy where the rule is broken."""
    data: dict[str, Any] | None = None
    """Figures, for programs."""


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
MODULE = "roll.doctor.trials"
"""The program that runs a trial, given its name."""
_ROOT = str(Path(roll.__file__).parents[1])
_LAST_LINES = 3


@dataclass(frozen=True)
class Outcome:
    """The end of a trial's process."""

    words: list[dict[str, Any]]
    """Its output."""
    error: str
    """Empty: it ended well."""


def trials(
    commands: Sequence[tuple[str, ...]], deadline: float, environ: Mapping[str, str] | None = None
) -> list[Outcome]:
    """Run trials at the same time, as the ranks of a collective; those that are late are killed with their children."""
    kept = {name: value for name, value in os.environ.items() if name not in NODE_VARIABLES}
    path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH", ""))))
    environment = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environ or {})}

    def run(command: Sequence[str]) -> Outcome:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        late = ""
        try:
            output, errors = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            output, errors = process.communicate()
            late = f"no end within {deadline:g} s; it hung"
        words = [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
        last = f" after {words[-1]['did']!r}" if words else ""
        if late or not process.returncode:
            return Outcome(words, late and late + last)
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return Outcome(words, " | ".join(lines[-_LAST_LINES:]) or f"ended with status {process.returncode}{last}")

    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(run, commands))


def did(what: str, **figures: object) -> None:
    """Say that something is done."""
    sys.stdout.write(json.dumps({"did": what, **figures}) + "\n")
    sys.stdout.flush()


# Collectives

COLLECTIVE_SECONDS = 120.0
_BYTES = {"cpu": 16 << 20, "accelerator": 256 << 20}
_REPEATS = 5


def try_collectives(ranks: int) -> Iterator[Finding]:
    """All-reduce, all-to-all and broadcast among local ranks: right values, and bytes a second."""
    here = current_platform()
    on_cpu = here.name == "cpu"
    world = ranks if on_cpu else min(ranks, here.device_count())
    with tempfile.TemporaryDirectory(prefix="roll-doctor-") as folder:
        commands = [("collectives", str(rank), str(world), f"{folder}/store") for rank in range(world)]
        outcomes = trials(commands, COLLECTIVE_SECONDS, {"GLOO_SOCKET_IFNAME": "lo"} if on_cpu else {})
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
    backend, rule = here.collective_backend, "the sums are right, and every rank ends"
    if errors:
        remedy = (
            "see that 127.0.0.1 is up and not filtered"
            if on_cpu
            else "NCCL_DEBUG=INFO says where it stands; NCCL_P2P_DISABLE=1 leaves links between devices aside, and "
            "containers need --shm-size and --ipc=host"
        )
        yield Finding(f"{backend}, {world} ranks", "; ".join(errors), rule, Severity.ERROR, remedy)
        return
    for words in zip(*([word for word in outcome.words if "rate" in word] for outcome in outcomes), strict=True):
        slowest, size = min(word["rate"] for word in words), words[0]["bytes"]
        value = f"{slowest / 1e9:.2f} GB/s a rank ({backend}, {world} ranks, {size >> 20} MiB)"
        data = {"bytes_per_second": slowest, "ranks": world, "bytes": size}
        yield Finding(words[0]["did"], value, rule, data=data)


def collectives(rank_text: str, world_text: str, store: str) -> None:
    """One rank. The rate is what a rank sends and receives over its link in an optimal ring, as nccl-tests count it."""
    import torch
    import torch.distributed as dist

    here, rank, world = current_platform(), int(rank_text), int(world_text)
    on_cpu = here.name == "cpu"
    target = here.device(0 if on_cpu else rank)
    if not on_cpu:
        here.set_device(rank)
    count = _BYTES["cpu" if on_cpu else "accelerator"] // 4 // world * world
    own, received = (torch.empty(count, device=target) for _ in range(2))
    did("allocated")
    dist.init_process_group(
        here.collective_backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    did("joined")
    others = torch.arange(1, world + 1, device=target, dtype=torch.float32).unsqueeze(1)
    kinds: dict[str, tuple[float, Callable[[], object], Callable[[], torch.Tensor]]] = {
        "all-reduce": (2 * (world - 1) / world, lambda: dist.all_reduce(own), lambda: own == others.sum()),
        "all-to-all": (
            (world - 1) / world,
            lambda: dist.all_to_all_single(received, own),
            lambda: received.view(world, -1) == others,
        ),
        "broadcast": (1.0, lambda: dist.broadcast(own, world - 1), lambda: own == world),
    }
    for name, (share, run, are_right) in kinds.items():
        own.fill_(rank + 1.0)
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

    (outcome,) = trials([("sandbox",)], SANDBOX_SECONDS)
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


TRIALS: dict[str, Callable[..., None]] = {"collectives": collectives, "sandbox": sandbox}

if __name__ == "__main__":
    TRIALS[sys.argv[1]](*sys.argv[2:])
