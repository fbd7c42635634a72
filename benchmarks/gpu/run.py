"""Run the stages on this machine's GPU, most valuable first: ``python -m benchmarks.gpu.run [STAGE ...]``.

A call takes nine minutes (``GPU_SECONDS``): a stage that would not be done by then, as estimated, is left to the next
call, which leaves out what is measured already.  Stages that are named run however long they take.  Each has a time
limit; ``result.json`` is replaced after each, so that an end at any second keeps what was measured.
``ROLL_PLATFORM=cpu`` rehearses on a host without a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import ON_GPU, ROOT, STAGES, WORK

SECONDS = float(os.environ.get("GPU_SECONDS", 540 if ON_GPU else "inf"))
RESULT = Path(os.environ.get("GPU_RESULT", WORK / "result.json"))


def machine() -> dict[str, Any]:
    """Chip, driver and versions."""
    import torch

    packages = {}
    for name in ("torch", "transformers", "ray", "vllm", "deepspeed", "megatron-core", "triton", "liger-kernel"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    found: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count(), "packages": packages}
    if ON_GPU:
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        found |= {"gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1), "driver": driver}
        found["cuda"] = torch.version.cuda
    return found


def run_stage(name: str) -> dict[str, Any]:
    """Figures of a stage, with ``seconds``, and ``error`` where it failed or ran out of time."""
    WORK.mkdir(parents=True, exist_ok=True)
    out, log = WORK / f"{name}.json", WORK / f"{name}.log"
    out.unlink(missing_ok=True)
    began = time.perf_counter()
    error = None
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.stages", name, str(out)],
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            if process.wait(STAGES[name].limit_s):
                error = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            error = f"ended after its limit of {STAGES[name].limit_s} s"
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            # Workers of a run that was cut short would keep the GPU's memory.
            subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "stop", "--force"], stdout=stream, check=False)
    figures = json.loads(out.read_text()) if out.exists() else {}
    if error:
        figures["error"] = error
    return {**figures, "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    until, named = time.monotonic() + SECONDS, sys.argv[1:]
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"machine": machine(), "stages": {}}
    left = []
    for name in named or STAGES:
        if "seconds" in (known := result["stages"].get(name, {})) and "error" not in known:
            continue
        if not named and time.monotonic() + STAGES[name].estimate_s > until:
            left.append(name)
            continue
        result["stages"][name] = figures = run_stage(name)
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        partial = RESULT.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1))
        partial.replace(RESULT)
        said = figures.get("error", "done").strip().splitlines()[-1]
        print(f"{figures['seconds']:7.1f} s  {name}: {said[:300]}", flush=True)
    if left:
        print(f"for the next call: {', '.join(left)}")


if __name__ == "__main__":
    main()
