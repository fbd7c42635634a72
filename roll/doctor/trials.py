"""Findings that take a trial: imports, devices, collectives, Ray, the sandbox.

Each trial is a process of its own (``python -m roll.doctor.trials NAME ...``) with a deadline: a driver that hangs, a
library that crashes and a network that drops packets end the trial and nothing else. A trial writes a line of JSON for
each thing that it has done, so that one which does not end is known by the last thing that it did.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import roll
from roll.config.strategies.registry import BACKENDS
from roll.distributed.guard import kill_tree
from roll.doctor.findings import Finding, Severity, judge
from roll.platforms import current_platform
from roll.preflight import is_installed

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
    seconds: float


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
            outcomes.append(_outcome(process, files, late, deadline, time.monotonic() - began))
        return outcomes


def _outcome(
    process: subprocess.Popen[bytes], files: Sequence[IO[bytes]], late: bool, deadline: float, seconds: float
) -> Outcome:
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
    return Outcome(words, error, seconds)


def did(what: str, **figures: Any) -> None:
    """Say that something is done."""
    sys.stdout.write(json.dumps({"did": what, **figures}) + "\n")
    sys.stdout.flush()


# Imports

IMPORT_SECONDS = 180.0


def try_imports() -> dict[str, str]:
    """Import the modules of every backend that is installed; by backend, the error of those that cannot be."""
    broken = {}
    for backend in BACKENDS.rows:
        if backend.package is None or is_installed(backend.package.module):
            paths = filter(None, (backend.computes, backend.generates, backend.scores))
            outcome = trial("imports", *(path.rpartition(".")[0] for path in paths), deadline=IMPORT_SECONDS)
            if outcome.error:
                broken[backend.name] = outcome.error.rpartition(" | ")[2]
    return broken


def imports(*modules: str) -> None:
    import importlib

    for module in modules:
        importlib.import_module(module)
        did(module)


# Devices

DEVICE_SECONDS = 120.0
_SIDE = 1024


def try_devices() -> Iterator[Finding]:
    """Compute on every device, and ask NVIDIA's tool for errors that the memory of devices could not correct."""
    here = current_platform()
    if here.name == "cpu":
        return
    for index in range(here.device_count()):
        outcome = trial("device", str(index), deadline=DEVICE_SECONDS)
        figures = outcome.words[-1] if outcome.words else {}
        value = outcome.error or (
            f"{figures['name']}: {figures['free'] / 2**30:.1f} of {figures['total'] / 2**30:.1f} GiB free, "
            f"{figures['tflops']:.0f} TFLOP/s in bf16"
        )
        yield judge(
            f"{here.name}:{index}",
            value,
            "a product of matrices is that of the CPU, and 90% of its memory is free",
            not outcome.error and figures["free"] >= 0.9 * figures["total"],
            "see the driver's messages (dmesg | grep -i xid), reset the device, or leave it out of device_mapping"
            if outcome.error
            else "another process holds memory of it: nvidia-smi (or rocm-smi, npu-smi) says which",
            severity=Severity.ERROR if outcome.error else Severity.WARNING,
            seconds=outcome.seconds,
            data=figures or None,
        )
    yield from _uncorrected_errors()


def _uncorrected_errors() -> Iterator[Finding]:
    lines = _nvidia_smi("--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader").splitlines()
    if not lines:
        return
    rows = [[part.strip() for part in line.split(",")] for line in lines if "," in line]
    bad = [f"cuda:{index} has {count}" for index, count in rows if count.isdigit() and int(count) > 0]
    yield judge(
        "uncorrected memory errors",
        ", ".join(bad) or "none",
        "none since the driver was loaded",
        not bad,
        "take the device out of service: results and weights on it may be wrong",
        severity=Severity.ERROR,
    )


def device(index: str) -> None:
    import torch

    here = current_platform()
    target = here.device(int(index))
    here.set_device(int(index))
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIDE, _SIDE, generator=generator, dtype=torch.float64) for _ in range(2))
    found = (left.to(target).float() @ right.to(target).float()).cpu().double()
    difference = (found - left @ right).abs().max().item()
    if not difference < 0.5:  # TF32 rounds each factor to 2**-11, and a sum has 1024 terms
        raise RuntimeError(f"a product of matrices is off by {difference:g}")
    big = torch.randn(8192, 8192, device=target, dtype=torch.bfloat16)
    for _ in range(3):
        big @ big
    seconds = _seconds(partial(torch.matmul, big, big), 10)
    module = getattr(torch, here.device_type)
    del big
    module.empty_cache()
    free, total = module.mem_get_info(int(index))
    name = module.get_device_name(int(index))
    did("a product of matrices", name=name, free=free, total=total, tflops=10 * 2 * 8192**3 / seconds / 1e12)


def _seconds(run: Callable[[], object], repeats: int) -> float:
    """The duration of all ``repeats`` on the current device."""
    here = current_platform()
    here.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    here.synchronize()
    return time.perf_counter() - began


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
    backend, seconds = here.collective_backend, max(outcome.seconds for outcome in outcomes)
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
        yield Finding(what, "; ".join(errors), rule, Severity.ERROR, remedy, seconds)
        return
    nominal = "" if on_cpu or world == 1 else nominal_speed()
    for word in outcomes[0].words:
        if "rate" in word and word is not link:
            slowest = min(
                other["rate"] for outcome in outcomes for other in outcome.words if other["did"] == word["did"]
            )
            copied = "" if link is None else f"; a copy {link['between']}: {link['rate'] / 1e9:.2f} GB/s{nominal}"
            yield Finding(
                word["did"],
                f"{slowest / 1e9:.2f} GB/s a rank ({backend}, {world} ranks, {word['bytes'] >> 20} MiB{copied})",
                rule,
                seconds=word["seconds"],
                data={"bytes_per_second": slowest, "ranks": world, "bytes": word["bytes"]},
            )


PCIE_LANE_GB = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of a lane in one direction, by generation of PCI Express."""


def nominal_speed() -> str:
    """NVIDIA's report of the first device's links, as the end of a sentence; empty where it says nothing."""
    status = _nvidia_smi("nvlink", "--status", "-i", "0")
    links = [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", status)]
    if links:
        return f", nominally {sum(links):.0f} GB/s ({len(links)} NVLinks)"
    query = ("--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader", "-i", "0")
    parts = [part.strip() for part in _nvidia_smi(*query).split(",")]
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[0]) not in PCIE_LANE_GB:
        return ""
    generation, lanes = map(int, parts)
    return f", nominally {PCIE_LANE_GB[generation] * lanes:.0f} GB/s (PCIe {generation} x{lanes})"


def _nvidia_smi(*words: str) -> str:
    """The output of NVIDIA's tool; empty where it fails, or there is none."""
    command = ["nvidia-smi", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEVICE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


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


# Ray

RAY_SECONDS = 120.0


def try_ray() -> Iterator[Finding]:
    """Start a private Ray with one worker, call it, and end both; nothing of them may be left."""
    outcome = trial("start_ray", deadline=RAY_SECONDS)
    times = {word["did"]: word for word in outcome.words}
    value = outcome.error or (
        f"started in {times['started']['seconds']:.1f} s, worker in {times['called']['seconds']:.1f} s, "
        f"ended in {times['ended']['seconds']:.1f} s"
    )
    yield judge(
        "start and stop",
        value,
        "a private Ray on loopback starts, a worker answers, and nothing is left at the end",
        not outcome.error,
        "its logs say more: RAY_BACKEND_LOG_LEVEL=debug; a full or slow folder for temporary files, too few processes "
        "(ulimit -u) and a loopback interface that is down are the usual causes",
        severity=Severity.ERROR,
        seconds=outcome.seconds,
    )


def start_ray() -> None:
    from roll.config.roles import WorkerConfig
    from roll.distributed import Cluster, ResourceManager, Worker, ray_runtime
    from roll.distributed.guard import run_processes

    began = time.perf_counter()
    with ray_runtime(1) as runtime:
        did("started", seconds=time.perf_counter() - began)
        began = time.perf_counter()
        resources = ResourceManager(1)
        cluster = Cluster("doctor", Worker, resources, WorkerConfig(world_size=1))
        cluster.submit(0, Worker.ping).result(60)
        did("called", seconds=time.perf_counter() - began)
        cluster.shutdown()
        resources.close()
        began = time.perf_counter()
    left = run_processes(runtime.mark)
    if left:
        raise RuntimeError(f"processes of it are left: {left}")
    did("ended", seconds=time.perf_counter() - began)


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
        seconds=outcome.seconds,
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
    "imports": imports,
    "device": device,
    "collectives": collectives,
    "start_ray": start_ray,
    "sandbox": sandbox,
}

if __name__ == "__main__":
    TRIALS[sys.argv[1]](*sys.argv[2:])
