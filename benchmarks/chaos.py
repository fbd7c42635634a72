"""Kill runs at random moments, have them go on, and compare: ``python -m benchmarks.chaos --kills 100``.

Runs come in chains: started, killed, continued, killed again, until the last one is left alone. Two kinds of run, one
after the other, by turns: a synchronous one, whose metrics must equal those of the undisturbed run bit for bit; and an
asynchronous one, whose ledger must balance: every step has its prompts, none is trained on twice, none is lost.

Each kill has its moment: *any* (after a random time), or as soon as something is seen to go on: *saving* (the hidden
folder of a checkpoint), *weights* (an engine has received a bucket), *samples* (the reward is at work), each plus a few
random milliseconds. And each has its victim: *tree* (the run with everything that it has started, by SIGKILL, to be
started again from outside), or one process of a run that goes on by itself (``max_restarts``): *rank* (the trainer),
*driver*, *raylet*.

One JSON line a kill is appended to a file, and the table of docs/reliability.md is made from such lines.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roll.checkpoint.state import load_state
from roll.distributed.guard import command_of, descendants, kill, kill_tree
from roll.tracking import METRICS_NAME
from tests.faults.dying_workers import SIGNPOSTS_ENV
from tests.support.subprocess_runs import ROOT, Driver
from tests.support.tiny_runs import FinishedRun, TinyWorld, load_changed, make_world, rlvr_settings, untimed

STEPS, PROMPTS, SAMPLES = 8, 4, 4
WORKERS = "tests.faults.dying_workers"
MOMENTS = ("any", "saving", "weights", "samples")
VICTIMS = ("tree", "tree", "tree", "tree", "tree", "rank", "driver", "raylet")
"""Each is chosen as often as it stands here."""
PATIENCE = 300.0
LONGEST_WAIT = 4.0
"""Seconds of the longest random wait: about as long as the run takes from its first step to its last."""

FAULTS = {
    ("tree", "any"): "process tree, at any moment",
    ("tree", "saving"): "process tree, while a checkpoint is saved",
    ("tree", "weights"): "process tree, while weights travel",
    ("tree", "samples"): "process tree, while samples are scored",
    ("rank", "any"): "training rank (`max_restarts`)",
    ("driver", "any"): "driver (`max_restarts`)",
    ("raylet", "any"): "Ray's node daemon (`max_restarts`)",
}


def changes(kind: str, output: Path, signposts: Path) -> dict[str, Any]:
    """The tiny run: a checkpoint after every second step, all samples written down."""
    return {
        "max_steps": STEPS,
        "save_steps": 2,
        "async_generation_ratio": 1.0 if kind == "asynchronous" else 0.0,
        "rollout_dump_dir": str(output / "rollouts"),
        "resume_from_checkpoint": True,
        "actor_infer.worker_cls": f"{WORKERS}.SignpostedEngine",
        "rewards.digits.worker_cls": f"{WORKERS}.signposted_digit_share",
        "system_envs": {SIGNPOSTS_ENV: str(signposts)},
    }


class Chain:
    """A run that is killed several times and finished.

    Args:
        victim: of all kills of this chain.
        moments: of the kills, in order.
    """

    def __init__(
        self, kind: str, victim: str, moments: Sequence[str], world: TinyWorld, folder: Path, dice: random.Random
    ) -> None:
        self.kind, self.victim, self.moments, self.dice = kind, victim, list(moments), dice
        self.output, self.signposts = folder / "run", folder / "signposts"
        self.signposts.mkdir(parents=True)
        own = {} if victim == "tree" else {"max_restarts": 100, "restart_backoff": 0.0}
        load_changed(rlvr_settings(world, self.output), changes(kind, self.output, self.signposts) | own)
        self.errors = folder / "stderr.txt"

    def run(self) -> list[dict[str, Any]]:
        """Kill, continue, finish; a row for each kill."""
        rows = []
        process = self._start()
        try:
            for moment in self.moments:
                if not self._reach(process, moment):
                    break  # the run was done before its moment came
                steps = self._steps_done()
                self._kill(process)
                killed = time.time()
                # What stands in a checkpoint is not lost; a hidden folder is no checkpoint.
                row = {"kind": self.kind, "victim": self.victim, "moment": moment, "lost_steps": steps - self._saved()}
                if self.victim == "tree":
                    process = self._start()
                self._wait(lambda: self._has_step_since(killed) or process.poll() is not None)  # noqa: B023
                rows.append(row | {"lost_samples": 0, "seconds": round(time.time() - killed, 1)})
            status = process.wait(PATIENCE)
        finally:
            kill_tree(process.pid)
        assert status == 0, self.errors.read_text()
        return rows

    def _start(self) -> subprocess.Popen[bytes]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "ROLL_"))}
        with self.errors.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "roll.cli", "run", str(self.output / "input" / "config.yaml")],
                env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def _reach(self, process: subprocess.Popen[bytes], moment: str) -> bool:
        """Wait for the moment; False: the run was done before."""
        self._wait(lambda: self._steps_done() > 0 or process.poll() is not None)
        if moment == "any":
            until = time.monotonic() + self.dice.uniform(0, LONGEST_WAIT)
            self._wait(lambda: time.monotonic() > until or process.poll() is not None)
        elif moment == "saving":
            self._wait(lambda: any(self.output.glob("checkpoints/.*.partial")) or process.poll() is not None)
        else:
            sign, began = self.signposts / moment, time.time()
            self._wait(lambda: (sign.exists() and sign.stat().st_mtime > began) or process.poll() is not None)
        time.sleep(self.dice.uniform(0, 0.03))
        return process.poll() is None

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if self.victim == "tree":
            kill_tree(process.pid)
            process.wait()
        elif self.victim == "rank":
            kill([Driver(process, self.output).worker_pid("actor_train-0") or process.pid])
        elif self.victim == "driver":
            kill(descendants(process.pid)[:1])
        else:
            kill(pid for pid in descendants(process.pid) if "/raylet" in command_of(pid).split(" ")[0])

    def _steps_done(self) -> int:
        return len(self._rows())

    def _has_step_since(self, moment: float) -> bool:
        return any(row["time"] > moment for row in self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        """Steps in the metrics as they are now; a line may be half written, and the file replaced."""
        file, rows = self.output / "logs" / METRICS_NAME, []
        for line in file.read_text().splitlines() if file.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return [row for row in rows if "system/global_step" in row]

    def _saved(self) -> int:
        steps = [int(one.name.removeprefix("checkpoint-")) for one in self.output.glob("checkpoints/checkpoint-*")]
        return max(steps, default=0)

    def _wait(self, look: Callable[[], bool]) -> None:
        give_up = time.monotonic() + PATIENCE
        while not look():
            assert time.monotonic() < give_up, f"it did not happen in time; {self.errors.read_text()}"
            time.sleep(0.005)

    def problems(self, undisturbed: FinishedRun) -> list[str]:
        """Differences from a run that was not killed; empty: there are none."""
        finished = FinishedRun(self.output)
        if [row["step"] for row in finished.steps] != list(range(STEPS)):
            return [f"steps {[row['step'] for row in finished.steps]}"]
        if self.kind == "synchronous":
            pairs = zip(map(untimed, finished.steps), map(untimed, undisturbed.steps), strict=True)
            return [
                f"step {ours['step']}: {name} is {ours.get(name)}, not {value}"
                for ours, theirs in pairs
                for name, value in theirs.items()
                if ours.get(name) != value
            ]
        ledger = load_state(self.output / "checkpoints" / f"checkpoint-{STEPS}" / "pipeline")["rollout"]["ahead"][
            "ledger"
        ]
        found = []
        if ledger != {"drawn": STEPS * PROMPTS, "trained": STEPS * PROMPTS, "filtered": 0, "stale": 0}:
            found.append(f"the ledger is {ledger}")
        files = sorted((self.output / "rollouts").glob("train-*.jsonl"))
        trained = [{json.loads(line)["prompt_id"] for line in file.read_text().splitlines()} for file in files]
        if [len(one) for one in trained] != [PROMPTS] * STEPS or len(set().union(*trained)) != STEPS * PROMPTS:
            found.append("the prompts of the steps are not each other's complement")
        return found


def chaos(
    kills: int, seed: int, folder: Path, record: Path, per_chain: int = 5, victims: Sequence[str] = VICTIMS
) -> int:
    """Kill ``kills`` times; the number of chains that went wrong. ``record`` gets a line a kill."""
    dice = random.Random(seed)
    world = tiny_world(folder / "world")
    undisturbed = Chain("synchronous", "tree", (), world, folder / "undisturbed", dice)
    undisturbed.run()
    done = wrong = 0
    for number in range(10_000):
        if done >= kills:
            break
        # Turns begin with either kind, so that short runs of this program try both.
        kind, victim = ("synchronous", "asynchronous")[(number + seed) % 2], dice.choice(victims)
        # A run that goes on by itself refuses to after two deaths in one place, and eight steps are few places.
        number_of = min(per_chain if victim == "tree" else 1, kills - done)
        moments = [dice.choice(MOMENTS) if victim == "tree" else "any" for _ in range(number_of)]
        chain = Chain(kind, victim, moments, world, folder / f"chain-{number}", dice)
        rows = chain.run()
        problems = chain.problems(FinishedRun(undisturbed.output))
        for text in problems:
            sys.stderr.write(f"chain {number} ({kind}, {victim}): {text}\n")
        wrong += bool(problems)
        done += len(rows)
        with record.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row | {"equal": not problems, "seed": seed, "chain": number}) + "\n")
        sys.stderr.write(f"{done} of {kills} kills, {wrong} chains differ\n")
    return wrong


def tiny_world(folder: Path) -> TinyWorld:
    """The model and the problems of the tiny example."""
    example = ROOT / "examples" / "tiny"
    sys.path.insert(0, str(example))
    try:
        tiny = {name: importlib.import_module(name) for name in ("tiny_model", "word_problems")}
    finally:
        sys.path.remove(str(example))
    folder.mkdir(parents=True)
    return make_world(tiny, folder)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each kind of fault and run."""
    by_fault = defaultdict(list)
    for row in rows:
        by_fault[row["victim"], row["moment"], row["kind"]].append(row)
    lines = [
        "| fault | run | injected | lost steps, mean (most) | lost or doubled samples | seconds, median (most) |",
        "|---|---|---|---|---|---|",
    ]
    for (victim, moment), fault in FAULTS.items():
        for kind in ("synchronous", "asynchronous"):
            found = by_fault[victim, moment, kind]
            if not found:
                continue
            steps, seconds = [row["lost_steps"] for row in found], [row["seconds"] for row in found]
            unequal = sum(not row["equal"] for row in found)
            samples = f"{unequal} of {len(found)} runs differ" if unequal else "0"
            lines.append(
                f"| {fault} | {kind} | {len(found)} | {statistics.mean(steps):.1f} ({max(steps)}) | {samples} "
                f"| {statistics.median(seconds):.1f} ({max(seconds):.1f}) |"
            )
    return "\n".join(lines)


BEGIN, END = "<!-- kills: begin -->", "<!-- kills: end -->"


def write_table(page: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replace what stands between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status is 1 if a run differed."""
    parser = argparse.ArgumentParser(description="Kill runs at random moments, have them go on, and compare.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="file of one JSON line a kill, appended to")
    parser.add_argument("--page", type=Path, help="page whose table is made anew from the record")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="roll-chaos-") as folder:
        record = arguments.record or Path(folder) / "kills.jsonl"
        wrong = chaos(arguments.kills, arguments.seed, Path(folder), record) if arguments.kills else 0
        rows = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    sys.stdout.write(table(rows) + "\n")
    if arguments.page is not None:
        write_table(arguments.page, rows)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
