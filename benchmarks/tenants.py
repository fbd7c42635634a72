"""Tenants of ``roll serve-training``: what LoRA clients of one base cost together, and what they do to each other.

Tenants differ in rank, learning rate and schedule. The service has a process of its own, its clients (the ``tinker``
SDK) in this one. One run measures

- *memory*: growth of the service's resident memory by each of ``--tenants`` tenants of rank 32 that has taken a step,
  next to the bytes of its adapter and both moments;
- *throughput*: tokens a second of all tenants one after another, then of the same at the same time, and whether every
  loss and every norm of a gradient is the same bit for bit;
- *fairness*: seconds of a step of 3 modest clients, alone and while another client has all its models flooded with
  passes four times as long;
- *faults*: the tenants again, beside one whose losses are not finite and one that has vanished, its passes waiting.

Seconds are the clock's, on whatever else the machine does meanwhile; ``cpu`` are those of the service's process.

    python -m benchmarks.tenants MODEL_FOLDER [--steps 3] [--tenants 16] [--length 64] [--output tenants.json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types

NAME = "base"
MODEST, FLOODED, FLOOD = 3, 4, 4
RANKS = (4, 8, 16, 32)
DATA, MODEST_LENGTH = 4, 64
MEMORY_RANK = 32

VANISHING = """
import sys, tinker
from benchmarks import tenants
models = [tenants.new_model(tenants.connect(sys.argv[1]), 8, 0)]
sent = [models[0].forward_backward(tenants.batch(0, 4), "cross_entropy") for _ in range(200)]
sent[0].result()
print("sent", flush=True)
sys.stdin.read()
"""


def connect(url: str) -> Any:
    return tinker.ServiceClient(base_url=url, api_key="tml-any")


def new_model(service: Any, rank: int, seed: int) -> Any:
    return service.create_lora_training_client(NAME, rank=rank, seed=seed).result()


def batch(seed: int, times: int = 1, length: int = MODEST_LENGTH) -> list[Any]:
    """``DATA * times`` data of ``length`` random tokens."""
    random, found = torch.Generator().manual_seed(seed), []
    for _ in range(DATA * times):
        tokens = torch.randint(3, 400, (length + 1,), generator=random)
        inputs = {"target_tokens": tokens[1:], "weights": torch.ones(length)}
        found.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return found


def rate(tenant: int, step: int) -> float:
    """Learning rates that are constant, fall, or rise, none the same."""
    return 1e-3 * (1 + tenant / 16) * (1.0, 1 / (step + 1), (step + 1) / 4)[tenant % 3]


def train(url: str, tenant: int, steps: int, length: int) -> list[tuple[float, float]]:
    """Losses and norms of a tenant's steps."""
    service, seen = connect(url), []
    model = new_model(service, RANKS[tenant % len(RANKS)], tenant)
    for step in range(steps):
        passed = model.forward_backward(batch(100 * tenant + step, length=length), "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=rate(tenant, step)))
        seen.append((passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]))
    service.close("success")
    return seen


class Process:
    """The service's process."""

    def __init__(self, url: str, pid: int, output: Path) -> None:
        self.url, self.output, self._folder = url, output, Path(f"/proc/{pid}")

    def memory(self) -> int:
        """Resident bytes."""
        return int((self._folder / "statm").read_text().split()[1]) * resource.getpagesize()

    def cpu(self) -> float:
        """Seconds of user and system time."""
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def timed(self, work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
        clock, cpu = time.perf_counter(), self.cpu()
        found = work()
        return {"seconds": time.perf_counter() - clock, "cpu": self.cpu() - cpu}, found


@contextmanager
def served(model: str) -> Iterator[Process]:
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "output"), Path(folder, "log")
        words = [model, "--model-name", NAME, "--max-length", "512", "--port", "0", "--max-models", "64"]
        command = [sys.executable, "-m", "roll.cli", "serve-training", *words, "--output", str(output)]
        with log.open("w") as file, subprocess.Popen(command, stderr=file) as running:
            try:
                while "base_url=" not in (text := log.read_text()):
                    if running.poll() is not None:
                        raise RuntimeError(text)
                    time.sleep(0.2)
                yield Process(text.rpartition("base_url=")[2].split()[0], running.pid, output)
            finally:
                running.kill()


def measure_memory(process: Process, tenants: int) -> dict[str, float]:
    service = connect(process.url)

    def made(seed: int) -> Any:
        model = new_model(service, MEMORY_RANK, seed)
        model.forward_backward(batch(seed), "cross_entropy")
        model.optim_step(types.AdamParams()).result()
        return model

    models = [made(seed) for seed in range(3)]  # the first ones also make kernels
    before = process.memory()
    models += [made(seed) for seed in range(3, 3 + tenants)]
    grown = (process.memory() - before) / tenants
    models[0].save_state("state").result()
    (saved,) = process.output.glob("*/weights/state")
    service.close("success")
    return {
        "tenant": grown,
        "adapter_and_moments": sum(file.stat().st_size for file in saved.glob("*.safetensors")),
        "service": process.memory(),
    }


def measure_throughput(process: Process, steps: int, tenants: int, length: int) -> tuple[dict[str, Any], list[Any]]:
    everyone = range(tenants)
    tokens = tenants * steps * DATA * length
    run = partial(train, process.url, steps=steps, length=length)
    alone, solo = process.timed(lambda: [run(tenant) for tenant in everyone])
    with ThreadPoolExecutor(tenants) as threads:
        together, found = process.timed(lambda: list(threads.map(run, everyone)))
    return {
        "alone": {**alone, "tokens_per_second": tokens / alone["seconds"]},
        "together": {**together, "tokens_per_second": tokens / together["seconds"]},
        "speedup": alone["seconds"] / together["seconds"],
        "cpu_ratio": alone["cpu"] / together["cpu"],
        "bit_equal": found == solo,
    }, solo


def measure_fairness(process: Process, steps: int) -> dict[str, Any]:
    modest = [new_model(connect(process.url), 8, seed) for seed in range(MODEST)]

    def waits(model: Any) -> list[float]:
        seconds = []
        for step in range(steps):
            started = time.perf_counter()
            model.forward_backward(batch(step), "cross_entropy")
            model.optim_step(types.AdamParams()).result()
            seconds.append(time.perf_counter() - started)
        return seconds

    def of_all() -> list[float]:
        with ThreadPoolExecutor(MODEST) as threads:
            return [one for own in threads.map(waits, modest) for one in own]

    of_all()
    quiet = of_all()
    service = connect(process.url)
    models = [new_model(service, 8, seed) for seed in range(FLOODED)]
    started = time.perf_counter()
    sent = [model.forward_backward(batch(1, 4), "cross_entropy") for _ in range(FLOOD) for model in models]
    flooded = of_all()
    for one in sent:
        one.result()
    ended = time.perf_counter() - started
    return {
        "quiet": _spread(quiet),
        "flooded": _spread(flooded),
        "longer": statistics.median(flooded) / statistics.median(quiet),
        "flood_seconds": ended,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "longest": max(seconds)}


def measure_faults(process: Process, steps: int, length: int, solo: list[Any]) -> dict[str, Any]:
    bad = new_model(connect(process.url), 8, 0)
    poison = batch(0)
    poison[0].loss_fn_inputs["weights"] = types.TensorData.from_torch(torch.full((MODEST_LENGTH,), float("nan")))
    failures = 0
    command = [sys.executable, "-c", VANISHING, process.url]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as vanishing,
        ThreadPoolExecutor(len(solo)) as threads,
    ):
        assert vanishing.stdout is not None
        vanishing.stdout.readline()
        vanishing.kill()
        started = time.perf_counter()
        runs = [threads.submit(train, process.url, tenant, steps, length) for tenant in range(len(solo))]
        while not all(run.done() for run in runs):
            bad.forward_backward(poison, "cross_entropy")
            try:
                bad.optim_step(types.AdamParams()).result()
            except tinker.RequestFailedError:
                failures += 1
        seconds = time.perf_counter() - started
    return {"bit_equal": [run.result() for run in runs] == solo, "failed_steps": failures, "seconds": seconds}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder or hub name")
    parser.add_argument("--steps", type=int, default=3, help="of each tenant (default: 3)")
    parser.add_argument("--tenants", type=int, default=16, help="clients at the same time (default: 16)")
    parser.add_argument("--length", type=int, default=64, help="tokens of each of their 4 data (default: 64)")
    parser.add_argument("--output", type=Path, help="JSON file with the result")
    options = parser.parse_args(words)
    result: dict[str, Any] = {}

    def report(name: str, found: dict[str, Any]) -> None:
        result[name] = found
        sys.stdout.write(json.dumps({name: found}, indent=2) + "\n")
        sys.stdout.flush()
        if options.output is not None:
            options.output.write_text(json.dumps(result, indent=2))

    with served(options.model) as process:
        report("memory", measure_memory(process, options.tenants))
        throughput, solo = measure_throughput(process, options.steps, options.tenants, options.length)
        report("throughput", throughput)
        report("fairness", measure_fairness(process, options.steps))
        report("faults", measure_faults(process, options.steps, options.length, solo))


if __name__ == "__main__":
    main()
