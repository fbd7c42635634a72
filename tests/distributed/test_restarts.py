"""The supervisor of runs, with runs that only say what a run says."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from roll.config.run import RunConfig
from roll.distributed.restarts import RECORD_NAME, Supervisor

RUN = """
import json, os, signal, sys, time
from roll.distributed.restarts import supervised
supervised.attach()
signal.signal(signal.SIGUSR1, lambda *_: None)
folder, checkpoint = sys.argv[1:]
number = len(os.listdir(folder))
acts = json.loads(os.environ["ACTS"])[number]
facts = [checkpoint, sorted(supervised.left_out), supervised.rejoin_seconds]
print(json.dumps(facts), file=open(f"{folder}/{number}", "w"))
for name, value in acts:
    if name == "die":
        os.kill(os.getpid(), value)
    elif name == "exit":
        sys.exit(value)
    elif name == "sleep":
        time.sleep(value)
    else:
        supervised.tell(**{name: value})
"""
"""Says, does and ends as the entry of ``ACTS`` for its number in the row of starts."""


class Stage:
    """Starts runs under a supervisor."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.starts, self.logs, self.said = folder / "starts", folder / "logs", []
        self.starts.mkdir()
        self.patch = patch

    def run(self, *acts: list[tuple[str, Any]], max_restarts: int = 3, backoff: float = 0.0) -> int:
        self.patch.setenv("ACTS", json.dumps(acts))

        def command(checkpoint: str | None) -> list[str]:
            return [sys.executable, "-c", RUN, str(self.starts), str(checkpoint)]

        config = RunConfig(max_restarts=max_restarts, restart_backoff=backoff)
        return Supervisor(command, config, self.logs, lambda path: "torn" not in path, self.said.append).run()

    @property
    def began_with(self) -> list[Any]:
        """Of each start: the checkpoint, steps left out, seconds that a further node waits for its head."""
        return [json.loads((self.starts / str(n)).read_text()) for n in range(len(os.listdir(self.starts)))]

    @property
    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in (self.logs / RECORD_NAME).read_text().splitlines()]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def failed(step: int, *checkpoints: str) -> list[tuple[str, Any]]:
    """A run that reaches a step and loses a worker."""
    saved = [("checkpoint", [path]) for path in checkpoints]
    return [("reached", 0), *saved, ("reached", step), ("cause", "actor_train rank 1 died"), ("end", "failed")]


DONE = [("reached", 9), ("end", "done")]
REWOUND = [[("checkpoint", ["c4"]), ("reached", 5 + n), ("end", "rewind"), ("exit", 1)] for n in range(9)]


def test_a_run_goes_on_from_its_newest_whole_checkpoint(stage: Stage) -> None:
    killed = [("reached", 5), ("checkpoint", ["c4"]), ("reached", 8), ("die", signal.SIGKILL)]
    assert stage.run([*failed(5, "c2", "c4", "torn"), ("exit", 1)], killed, DONE) == 0
    assert [start[:2] for start in stage.began_with] == [["None", []], ["c4", []], ["c4", []]]
    assert stage.events == ["ended", "restarted", "recovered", "ended", "restarted"]
    assert stage.said == [
        "restart 1 of 3 in 0 s, from c4: actor_train rank 1 died",
        "restart 2 of 3 in 0 s, from c4: the run's process was killed by SIGKILL",
    ]
    assert "restart 1 of 3" in (stage.logs / "run.log").read_text()


@pytest.mark.parametrize(
    ("runs", "status", "why"),
    [
        ([[("end", "wrong"), ("exit", 1)]], 1, ""),
        ([[("end", "interrupted"), ("exit", 143)]], 143, ""),
        ([[("end", "done"), ("die", signal.SIGKILL)]], 0, ""),
        # Twice in the same place, give or take the step that is in flight; or as often as it may.
        ([failed(5, "c4"), failed(4, "c4")], 1, "died twice in the same place, after 4 steps, without progress; the e"),
        ([failed(3 * n, f"c{n}") for n in range(1, 5)], 1, "not started again: max_restarts: 3 is used up"),
        (REWOUND, 1, "rewound 3 times to the same checkpoint"),
    ],
    ids=["a mistake", "a signal", "done, then killed", "the same place", "too often", "rewound"],
)
def test_what_ends_for_good(stage: Stage, runs: list[list[tuple[str, Any]]], status: int, why: str) -> None:
    assert stage.run(*([*acts, ("exit", 1)] for acts in runs), DONE) == status
    assert len(stage.began_with) == min(len(runs), 4)
    assert why in "".join(stage.said[-1:])


def test_a_further_node_serves_again_until_the_head_does_not_come_back(stage: Stage) -> None:
    assert stage.run([("exit", 0)], [("exit", 0)], [("end", "done"), ("exit", 0)], DONE) == 0
    assert len(stage.began_with) == 3
    assert [rejoin >= 120 for _, _, rejoin in stage.began_with] == [False, True, True]


def test_a_rewound_run_leaves_the_batch_out(stage: Stage) -> None:
    """It costs no restart."""
    assert stage.run(*REWOUND[:2], DONE, max_restarts=0) == 0
    assert [start[:2] for start in stage.began_with] == [["None", []], ["c4", [5]], ["c4", [5, 6]]]


def test_a_run_that_sigusr1_has_ended_is_not_started_again(stage: Stage) -> None:
    def ask() -> None:
        while not (stage.starts / "0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=ask, daemon=True).start()
    acts = [("reached", 0), ("sleep", 0.3), *failed(3, "c2"), ("exit", 1)]
    assert stage.run(acts, DONE) == 1
    assert len(stage.began_with) == 1


def test_a_signal_reaches_the_run_and_ends_the_wait(stage: Stage) -> None:
    """Pauses double: the second is ten seconds, which the signal cuts short."""

    def interrupt() -> None:
        while len(stage.said) < 1:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    assert stage.run([*failed(5, "c4"), ("exit", 1)], DONE, backoff=30.0) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20
    assert len(stage.began_with) == 1
