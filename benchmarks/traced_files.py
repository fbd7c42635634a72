"""Numbers of files and functions of the package that a training step, a sample and a weight update pass through.

    python -m benchmarks.traced_files [--calls]           # print the table of docs/architecture.md
    python -m benchmarks.traced_files --write             # put it there

Runs GRPO for three synchronous steps on a tiny model (one rank of FSDP2, one engine of transformers, a reference, one
reward worker; needs no files) and counts, in its second step, what is entered in the driver and in all workers:

- **training step**: from the batch of samples to the updated model (reference log-probs, advantages, update);
- **sample**: from a drawn prompt to the batch (generation, reward, batch);
- **weight update**: from the trainer's weights to the engine that holds them.

Every process of the run imports this module first, through a ``sitecustomize`` on ``PYTHONPATH``, and writes down each
function once for each phase. The driver names the current phase in one byte of a file that all of them have mapped, so
a function is counted for the phase in which it is called, whichever process calls it. Background threads (the watch
over Ray, the engine's heartbeat) count as well where they wake up in a phase. Functions without a name of their own
(comprehensions, lambdas) and module bodies do not count.
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT / 'roll'}{os.sep}"
FOLDER = "ROLL_TRACE_FOLDER"
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- traced files -->", "<!-- end of traced files -->"
AIMS = {"training step": 20, "sample": 20, "weight update": 15}
"""Most files that a reader should have to open for each."""
MANY = 3
"""Functions from which on a file has a part of the story, and not a property or a check that the story asks."""
PHASES = tuple(AIMS)
NONE = 0
MEASURED_STEP = 1


def follow() -> None:
    """Write down what this process calls, if it belongs to a traced run. Called by ``sitecustomize``."""
    if FOLDER not in os.environ:
        return
    phase = _mapped(Path(os.environ[FOLDER]))
    seen: set[tuple[int, CodeType]] = set()
    ours: dict[CodeType, str | None] = {}
    record = os.open(Path(os.environ[FOLDER]) / f"calls-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or phase[0] == NONE or (phase[0], frame.f_code) in seen:
            return
        code = frame.f_code
        seen.add((phase[0], code))
        if code not in ours:
            inside = code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")
            ours[code] = f"{code.co_filename.removeprefix(PACKAGE)}\t{code.co_qualname}\n" if inside else None
        if (line := ours[code]) is not None:
            os.write(record, f"{phase[0]}\t{line}".encode())

    threading.setprofile(entered)
    sys.setprofile(entered)


def _mapped(folder: Path) -> mmap.mmap:
    with (folder / "phase").open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


def drive(folder: Path) -> None:
    """Run the pipeline in this process and name the phases."""
    from roll.pipelines.rlvr.pipeline import RLVRPipeline
    from tests.support.tiny_runs import load_changed, make_world, rlvr_settings, role

    sys.path.insert(0, str(ROOT / "examples/tiny"))
    tiny = {name: importlib.import_module(name) for name in ("tiny_model", "word_problems")}
    world = make_world(tiny, folder / "world")
    changes = {
        "max_steps": MEASURED_STEP + 2,
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
        "reference": role("fsdp2_infer", [0]),
        "rewards.digits.worker_cls": "gsm8k_rule",
    }
    pipeline = RLVRPipeline(load_changed(rlvr_settings(world, folder / "output"), changes))
    phase = _mapped(folder)
    current = [-1]

    def during(method: str, first: str | None, last: bool = True) -> None:
        """Enter the phase ``first`` when ``method`` is called, and leave it after it if it is the ``last`` of it."""
        call: Callable[..., Any] = getattr(pipeline, method)

        def wrapped(*args: Any) -> Any:
            if first is not None and current[0] == MEASURED_STEP:
                phase[0] = PHASES.index(first) + 1
            try:
                return call(*args)
            finally:
                if last:
                    phase[0] = NONE

        setattr(pipeline, method, wrapped)

    during("update_engines", "weight update")
    during("generate", "sample")
    during("add_model_columns", "training step", last=False)
    during("learn", None)
    train_one_step = pipeline.train_one_step

    def counted(step: int) -> None:
        current[0] = step
        train_one_step(step)
        current[0] = -1

    pipeline.train_one_step = counted
    pipeline.run()


def trace(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Functions by file by phase, of a run whose files go into the empty ``folder``."""
    environment = os.environ | prepare(folder)
    with (folder / "run.log").open("wb") as log:
        command = [sys.executable, "-m", "benchmarks.traced_files", "--drive", str(folder)]
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise SystemExit((folder / "run.log").read_text()[-4000:])
    return read(folder)


def prepare(folder: Path) -> dict[str, str]:
    """Make the files of a trace; the environment of its processes."""
    (folder / "phase").write_bytes(bytes([NONE]))
    (folder / "hook").mkdir()
    (folder / "hook/sitecustomize.py").write_text("from benchmarks.traced_files import follow\n\nfollow()\n")
    path = os.pathsep.join([str(folder / "hook"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {FOLDER: str(folder), "PYTHONPATH": path}


def read(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Functions by file by phase, as the processes of a trace have recorded them."""
    found: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in PHASES}
    for record in folder.glob("calls-*"):
        for line in record.read_text().splitlines():
            number, file, function = line.split("\t")
            found[PHASES[int(number) - 1]][file].add(function)
    return found


def table(found: dict[str, dict[str, set[str]]]) -> str:
    """The numbers of files and functions as the page has them."""
    rows = []
    for name, files in found.items():
        often = sum(len(functions) >= MANY for functions in files.values())
        rows.append(f"| {name} | {len(files)} | {often} | {AIMS[name]} | {sum(map(len, files.values()))} |")
    return "\n".join((f"| | files | with {MANY} functions or more | aim | functions |", "|---|---|---|---|---|", *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="list the functions, by file")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments.drive)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = trace(Path(folder))
    print(table(found))
    if arguments.write:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    if arguments.calls:
        for name, files in found.items():
            print(f"\n## {name}")
            for file, functions in sorted(files.items()):
                print(f"{file}: {', '.join(sorted(functions))}")


if __name__ == "__main__":
    main()
