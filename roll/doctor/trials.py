"""Findings that take a trial: collectives and the sandbox.

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import roll
from roll.distributed.guard import kill_tree
from roll.doctor.findings import Finding, Severity, judge
from roll.platforms import current_platform

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


def trial(name: str, *arguments: str, deadline: float) -> Outcome:
    """Run a trial to its end, at most ``deadline`` seconds."""
    return trials([(name, *arguments)], deadline)[0]


def trials(
    commands: Sequence[tuple[str, ...]], deadline: float, environ: Mapping[str, str] | None = None
) -> list[Outcome]:
    """Run trials at the same time, as the ranks of a collective; those that are late are killed with their children."""
    kept = {name: value for name, value in os.environ.items() if name not in NODE_VARIABLES}
    path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH", ""))))
    environment = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environ or {})}
    with tempfile.TemporaryDirectory(prefix="roll-doctor-") as folder:
        began = time.monotonic()
        started: list[tuple[subprocess.Popen[bytes], Sequence[IO[bytes]]]] = []
        for number, command in enumerate(commands):
            files: Sequence[IO[bytes]] = [open(Path(folder) / f"{number}.{kind}", "w+b") for kind in ("out", "err")]  # noqa: SIM115
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=files[0],
                stderr=files[1],
                start_new_session=True,
            )
            started.append((process, files))
        outcomes = []
        for process, files in started:
            late = False
            try:
                process.wait(max(0.0, began + deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
                kill_tree(process.pid)
                process.wait()
            outcomes.append(_outcome(process, files, late, deadline))
        return outcomes


def _outcome(process: subprocess.Popen[bytes], files: Sequence[IO[bytes]], late: bool, deadline: float) -> Outcome:
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read().decode(errors="replace"))
        file.close()
    words = [json.loads(line) for line in texts[0].splitlines() if line.startswith("{") and line.endswith("}")]
    last = f" after {words[-1]['did']!r}" if words else ""
    if late:
        error = f"no end within {deadline:g} s; it hung{last}"
    elif process.returncode:
        lines = [line.strip() for line in texts[1].splitlines() if line.strip()]
        error = " | ".join(lines[-_LAST_LINES:]) or f"ended with status {process.returncode}{last}"
    else:
        error = ""
    return Outcome(words, error)


def did(what: str, **figures: Any) -> None:
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
        environ = {"GLOO_SOCKET_IFNAME": "lo"} if on_cpu else {}
        outcomes = trials(commands, COLLECTIVE_SECONDS, environ)
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
    backend = here.collective_backend
    rule = "the sums are right, and every rank ends"
    link = next((word for word in outcomes[0].words if word["did"] == "copy"), None)
    if errors:
        remedy = (
            "see that 127.0.0.1 is up and not filtered"
            if on_cpu
            else "NCCL_DEBUG=INFO says where it stands; NCCL_P2P_DISABLE=1 leaves links between devices aside, and "
            "containers need --shm-size and --ipc=host"
        )
        what = f"{backend}, {world} ranks"
        yield Finding(what, "; ".join(errors), rule, Severity.ERROR, remedy)
        return
    for word in outcomes[0].words:
        if "rate" in word and word is not link:
            slowest = min(
                other["rate"] for outcome in outcomes for other in outcome.words if other["did"] == word["did"]
            )
            copied = "" if link is None else f"; a copy {link['between']}: {link['rate'] / 1e9:.2f} GB/s"
            yield Finding(
                word["did"],
                f"{slowest / 1e9:.2f} GB/s a rank ({backend}, {world} ranks, {word['bytes'] >> 20} MiB{copied})",
                rule,
                data={"bytes_per_second": slowest, "ranks": world, "bytes": word["bytes"]},
            )


def collectives(rank_text: str, world_text: str, store: str) -> None:
    """One rank. The rate is what a rank sends and receives over its link in an optimal ring, as nccl-tests count it."""
    import torch
    import torch.distributed as dist

    here, rank, world = current_platform(), int(rank_text), int(world_text)
    on_cpu = here.name == "cpu"
    target = here.device(0 if on_cpu else rank)
    if not on_cpu:
        here.set_device(rank)
    size = _BYTES["cpu" if on_cpu else "accelerator"]
    count = size // 4 // world * world
    own, received = (torch.empty(count, device=target) for _ in range(2))
    _copy_rate(own, received, world)
    from datetime import timedelta

    dist.init_process_group(
        here.collective_backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    did("joined")
    others = torch.arange(world, device=target, dtype=torch.float32)

    def reduced() -> bool:
        return bool((own == world * (world + 1) / 2).all())

    def exchanged() -> bool:
        return bool((received.view(world, -1) == (others + 1).unsqueeze(1)).all())

    def sent() -> bool:
        return bool((own == world).all())

    kinds: list[tuple[str, float, Callable[[], object], Callable[[], bool]]] = [
        ("all-reduce", 2 * (world - 1) / world, lambda: dist.all_reduce(own), reduced),
        ("all-to-all", (world - 1) / world, lambda: dist.all_to_all_single(received, own), exchanged),
        ("broadcast", 1.0, lambda: dist.broadcast(own, world - 1), sent),
    ]
    for name, share, run, is_right in kinds:
        own.fill_(rank + 1.0)
        run()
        if not is_right():
            raise RuntimeError(f"{name} gave wrong values")
        _measure(name, run, share if world > 1 else 1.0, 4 * count)
    dist.destroy_process_group()


def _seconds(run: Callable[[], object], repeats: int) -> float:
    """The duration of all ``repeats`` on the current device."""
    here = current_platform()
    here.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    here.synchronize()
    return time.perf_counter() - began


def _measure(name: str, run: Callable[[], object], share: float, size: int) -> None:
    import torch.distributed as dist

    dist.barrier()
    seconds = _seconds(run, _REPEATS)
    did(name, rate=share * size * _REPEATS / seconds, bytes=size, seconds=seconds)


def _copy_rate(source: Any, target: Any, world: int) -> None:
    """The rate of a plain copy, as a measure of the link: to the next device, or within the memory of the host."""
    here = current_platform()
    between = "in memory"
    if here.name != "cpu" and world > 1:
        target, between = target.to(here.device((source.device.index + 1) % world)), "to the next device"
    target.copy_(source)
    seconds = _seconds(lambda: target.copy_(source), _REPEATS)
    did("copy", rate=source.nbytes * _REPEATS / seconds, between=between)


# The sandbox

SANDBOX_SECONDS = 90.0


def try_sandbox() -> Iterator[Finding]:
    """Attack the sandbox of model-written code, as each reward worker does at its start."""
    from roll.rewards.sandbox.protections import CONSEQUENCES, PROMISED

    outcome = trial("sandbox", deadline=SANDBOX_SECONDS)
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
    from roll.rewards.sandbox import Sandbox

    box = Sandbox()
    report = box.start()
    box.close()
    given = [name for name, held in report.given.items() if held]
    did("attacked", given=given, missing=report.missing, means=list(report.means))


TRIALS: dict[str, Callable[..., None]] = {
    "collectives": collectives,
    "sandbox": sandbox,
}

if __name__ == "__main__":
    TRIALS[sys.argv[1]](*sys.argv[2:])
