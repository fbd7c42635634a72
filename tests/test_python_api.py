"""``import roll``: configurations, checks and runs from Python: scripts, notebooks, a Ray that was there before."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

import roll
from roll import api
from roll.cli import main
from roll.config import objects
from roll.config.loader import copy_recipes
from roll.tracking.callbacks import Callbacks, sample_rows
from tests.config.good import GOOD_SFT
from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.examples.pages import named_files
from tests.support.tiny_runs import TinyWorld, make_world, sft_settings

ROOT = Path(__file__).parents[1]
SFT = {**GOOD_SFT, "exp_name": "given", "output_dir": "output/${exp_name}"}


@pytest.fixture(scope="module")
def world(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:  # noqa: F811
    return make_world(tiny, tmp_path_factory.mktemp("world"))


def output_of(code: str, folder: Path, *words: str) -> list[str]:
    """Run a script in a process of its own; the lines of its standard output."""
    script = folder / "script.py"
    script.write_text(code, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_ADDRESS", "ROLL_"))}
    done = subprocess.run(
        [sys.executable, str(script), *words],
        # `ray.init()` leaves a token in the home folder, which every cluster of the host would ask for from then on.
        env={**kept, "PYTHONPATH": str(ROOT), "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes, and what the tiny one starts from."""
    folder = tmp_path_factory.mktemp("recipes")
    copy_recipes(folder)
    subprocess.run([sys.executable, folder / "examples/tiny/prepare.py"], check=True, capture_output=True)
    return folder


def in_python(code: str, folder: Path, *words: str) -> Any:
    """Run a script; what the last line of its output says, read as JSON."""
    return json.loads(output_of(code, folder, *words)[-1])


def test_the_import_is_light(tmp_path: Path) -> None:
    code = """
import json, sys, time
began = time.perf_counter()
import roll
seconds = time.perf_counter() - began
heavy = [name for name in ("torch", "ray", "hydra", "rich") if name in sys.modules]
roll.load_config, roll.run, roll.check, roll.STOP
heavy += [name for name in ("torch", "ray") if name in sys.modules]
print(json.dumps([seconds, heavy]))
"""
    seconds, heavy = in_python(code, tmp_path)
    assert seconds < 0.3
    assert heavy == []


def test_types_of_the_interface_are_declared() -> None:
    """The stub has the names that the package gives, from the modules that have them."""
    stub = ast.parse((ROOT / "roll/__init__.pyi").read_text(encoding="utf-8"))
    declared = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == roll._API
    assert set(declared) <= set(dir(roll))
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        roll.walk  # noqa: B018


def test_a_mapping_is_read_like_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``defaults`` from the working directory, interpolation, overrides of both forms; and it can be read again."""
    monkeypatch.chdir(tmp_path)
    Path("common.yaml").write_text("exp_name: shared\nsave_steps: 3\n", encoding="utf-8")
    data = {"defaults": ["_self_", "common@_here_"], **SFT, "max_steps": 4}
    loaded = roll.load_config(data, ["save_steps=5"], check_files=False)
    assert (loaded.config.save_steps, loaded.config.max_steps) == (5, 4)
    assert str(loaded.plan.output_dir) == "output/shared"
    again = roll.load_config(loaded, {"exp_name": "it's", "max_steps": 7}, check_files=False)
    assert (again.config.save_steps, again.config.max_steps) == (5, 7)
    assert str(again.plan.output_dir) == "output/it's"
    assert "owner/model" not in repr(loaded), "a configuration may hold secrets"


def test_mistakes_name_their_key() -> None:
    with pytest.raises(roll.ConfigError) as caught:
        roll.load_config({**SFT, "max_stepz": 1}, check_files=False)
    (problem,) = caught.value.problems
    assert (problem.key, problem.source) == ("max_stepz", "")
    found = roll.check({**SFT, "max_stepz": 1}, check_files=False)
    assert (found.problems, found.plan) == ((problem,), None)
    assert "the nearest known one is max_steps" in str(found)
    with pytest.raises(roll.ConfigError, match=r"sft_train.data_args.file_name\[0\].* is a object: must be a number"):
        roll.load_config({**SFT, "sft_train": {"data_args": {"file_name": [object()]}}})


@pytest.mark.long
def test_a_check_has_the_report_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    words = ["qwen2.5-7B-rlvr_fsdp2/rlvr_config", "max_steps=9"]
    found = roll.check(words[0], words[1:], check_files=False)
    assert found.problems == ()
    assert found.plan is not None
    assert found.plan.max_steps == 9
    assert main(["check", *words, "--skip-files"]) == 0
    printed = capsys.readouterr().out
    assert all(str(notice) in printed for notice in found.notes)
    assert str(found) == printed
    unfit = roll.check(words[0], check_files=False, gpu="rtx4090")
    assert unfit.problems


def test_objects_get_paths() -> None:
    """What can be imported has its own; others are the same object here, and an equal one where it is unpickled."""
    changes = {"sft_train.data_args.dataset_filter": json.dumps}
    importable = roll.load_config(SFT, changes, check_files=False)
    assert importable.config.sft_train.data_args.dataset_filter == "json.dumps"
    first, second = (lambda row: True), partial(max, 3)
    paths = [api.plain(one) for one in (first, second, lambda row: False, first)]
    assert paths == [f"roll.config.objects.{name}" for name in ("lambda", "partial", "lambda_2", "lambda")]
    assert objects.__getattr__("lambda") is first
    carried = objects.pickles()
    del objects._objects["partial"], objects._pickles["partial"]
    with pytest.raises(AttributeError, match="put it into a module"):
        objects.__getattr__("partial")
    objects.adopt(carried)
    assert objects.__getattr__("partial")(2) == 3


def test_what_python_alone_may_give_is_checked(world: TinyWorld, tmp_path: Path) -> None:
    class Eager:
        def on_step(self, step: int, metrics: Any) -> bool:
            return True

    with pytest.raises(TypeError, match="none of the methods on_step"):
        Callbacks([print])
    with pytest.raises(TypeError, match=r"Eager.on_step returned True: return roll.STOP"):
        Callbacks([Eager()]).call("on_step", 0, {})
    lock = Lock()
    with pytest.raises(roll.ConfigError, match=r"rewards.math.worker_cls.*cannot be sent to the workers.*a module"):
        roll.load_config(SFT, {"rewards.math.worker_cls": lambda response: lock})
    with pytest.raises(roll.ConfigError, match=r"max_restarts = 2: .*roll run"):
        roll.run(sft_settings(world, tmp_path), {"max_restarts": 2}, callbacks=[roll.Callback()])


def test_responses_with_characters_of_several_tokens_are_decoded() -> None:
    samples = [
        {"prompt": 0, "tokens": [0, 0], "score": 1.0, "metrics": {"length": 2.0}},
        {"prompt": 0, "tokens": [1, 2, 0]},
        {"prompt": 0, "response": "b"},
    ]
    block = {"step": 3, "kind": "train", "prompts": [{"id": "a", "text": "1+1", "truth": 2}], "samples": samples}
    block |= {"ids": [5, 7, 9], "pieces": ["a", "\ufffd", "\ufffd"]}
    rows = sample_rows(block, lambda ids: f"decoded {ids}")
    assert [row["response"] for row in rows] == ["aa", "decoded [7, 9, 5]", "b"]
    first = {"step": 3, "set": "train", "response": "aa", "prompt_id": "a", "prompt": "1+1", "ground_truth": 2}
    assert rows[0] == first | {"score": 1.0, "metrics/length": 2.0}


SCRIPT = """
import json, sys
from pathlib import Path
import pandas
import roll
from tests.support.tiny_runs import LengthGame, TinyWorld, agentic_settings, rlvr_settings

world, output = TinyWorld(Path(sys.argv[1])), Path(sys.argv[2])
BONUS = {"answer": 40.0}

def score(response, ground_truth, offset=0.0):
    return {"score": BONUS["answer"] + offset, "length": len(response)}

class Game(LengthGame):
    def step(self, action):
        return super().step(action)[0], 0.25, True, False, {}

def estimator(inputs, options):
    rewards = inputs.spread(inputs.response_rewards)
    return rewards - 1.0, rewards

def loss(inputs, options, metrics):
    metrics.mean("actor/own", inputs.advantages[inputs.mask].sum(), inputs.num_tokens)
    return -inputs.advantages * inputs.log_probs * inputs.mask

class Watch:
    def __init__(self):
        self.steps, self.samples, self.checkpoints, self.ended = [], [], [], []
    def on_step(self, step, metrics):
        self.steps.append([metrics["critic/score/mean"], "val/sampled/accuracy" in metrics])
        return roll.STOP if step == 2 else None
    def on_samples(self, step, samples):
        self.samples += [row for row in samples if row["set"] == "train"]
    def on_checkpoint(self, step, path):
        self.checkpoints.append([step, path.name, path.is_dir()])
    def on_end(self, run):
        self.ended.append(str(run.output_dir))

if __name__ == "__main__":
    settings = rlvr_settings(world, output / "first")
    settings["rewards"]["digits"] |= {"worker_cls": score, "reward_kwargs": {"offset": 2.0}}
    settings["actor_train"]["training_args"]["save_hf_model"] = True
    validation = {"data_args": {"file_name": [world.validation], "messages": "messages"}, "greedy": False}
    changes = {"actor_train.data_args.dataset_filter": lambda row: row["tag"] == "even", "validation": validation}
    changes |= {"async_generation_ratio": 1.0, "max_steps": 9, "eval_steps": 2, "save_steps": 1}
    watch = Watch()
    run = roll.run(settings, changes, callbacks=[watch])
    samples = pandas.DataFrame([row for row in run.samples if row["set"] == "train"])
    own = {"custom_envs.game.env_type": Game, "pg_variant": loss, "estimator": estimator}
    games = roll.run(agentic_settings(world, output / "games"), own)
    print(json.dumps({
        "steps": watch.steps, "checkpoints": watch.checkpoints, "ended": watch.ended,
        "same": [row["response"] for row in watch.samples] == list(samples["response"]),
        "tags": sorted(set(samples["tag"])), "scores": sorted(set(samples["score"])),
        "lengths": bool((samples["metrics/length"] >= 0).all()),
        "validated": [row["step"] for row in run.metrics if "val/sampled/accuracy" in row],
        "model": (run.model_path / "config.json").is_file(), "report": run.report.is_file(),
        "advantage": games.metrics[0]["actor/own"], "no model": games.model_path,
    }))
"""


@pytest.mark.long
@pytest.mark.e2e
def test_a_script_stops_its_run_and_starts_another(world: TinyWorld, tmp_path: Path) -> None:
    """A reward and a filter of the script itself; a callback that ends an asynchronous run after three of nine steps,
    with a model, the last validation being that of the last step. Then an environment, a loss and an estimator."""
    found = in_python(SCRIPT, tmp_path, str(world.folder), str(tmp_path))
    assert found["steps"] == [[42.0, True], [42.0, False], [42.0, True]]
    assert found["validated"] == [0, 2, 3]
    assert found["checkpoints"] == [[step, f"checkpoint-{step}", True] for step in (1, 2, 3)]
    assert found["ended"] == [str(tmp_path / "first")]
    assert (found["tags"], found["scores"]) == (["even"], [42.0])
    assert all(found[name] for name in ("same", "lengths", "model", "report"))
    assert found["advantage"] == pytest.approx(0.25 - 1)
    assert found["no model"] is None


GUEST = """
import asyncio, json, os, signal, sys, threading, time
from pathlib import Path
import ray
import roll
from tests.examples.pages import named_files
from tests.support.tiny_runs import TinyWorld, sft_settings

world, output = TinyWorld(Path(sys.argv[1])), Path(sys.argv[2])

class Interrupt:
    steps = 0
    def on_step(self, step, metrics):
        self.steps += 1
        if step == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.5)

async def run(watch):
    return roll.run(sft_settings(world, output), {"max_steps": 50, "eval_steps": 10}, callbacks=[watch])

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)

    @ray.remote
    class Counter:
        count = 0
        def add(self):
            self.count += 1
            return self.count

    counter, watch = Counter.remote(), Interrupt()
    before = ray.get(counter.add.remote())
    ended = asyncio.new_event_loop().run_until_complete(run(watch))  # no handler of SIGINT, as in a kernel
    give_up = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 2.0 and time.monotonic() < give_up:
        time.sleep(0.1)
    cpus = ray.available_resources()["CPU"]
    print(json.dumps([before, ray.get(counter.add.remote()), cpus, watch.steps, len(ended.metrics)]))
"""


@pytest.mark.long
@pytest.mark.e2e
def test_an_interrupted_run_under_a_loop_leaves_somebody_elses_ray(world: TinyWorld, tmp_path: Path) -> None:
    """The loop runs in the main thread, as in Jupyter: an interrupt there ends the run in good order. The Ray that was
    there goes on with its actors, and gets all of its CPUs back."""
    before, after, cpus, steps, rows = in_python(GUEST, tmp_path, str(world.folder), str(tmp_path / "run"))
    assert (before, after, cpus) == (1, 2, 2.0)
    assert steps == rows
    assert 2 <= rows < 10


@pytest.mark.matrix
@pytest.mark.e2e
def test_the_listing_of_the_page(recipes: Path) -> None:
    assert len((ROOT / "docs/python.md").read_text(encoding="utf-8").split()) <= 750
    reward, model, report = output_of(named_files(ROOT / "docs/python.md")["train.py"], recipes)[-1].split()
    assert 0 < float(reward) < 1
    assert (recipes / model / "config.json").is_file() and (recipes / report).is_file()


@pytest.mark.long
@pytest.mark.e2e
def test_the_listing_of_the_readme(recipes: Path) -> None:
    """Twenty lines train and sample: ten rewards, and a response of the trained model."""
    *_, rewards, texts = output_of(named_files(ROOT / "README.md")["train.py"], recipes)
    first, *_, last = ast.literal_eval(rewards)
    assert last > first
    assert len(ast.literal_eval(texts)) == 1


@pytest.mark.long
@pytest.mark.e2e
def test_the_loop_of_the_page(recipes: Path) -> None:
    """Four samples, each with as many log-probs as tokens; and a checkpoint."""
    loop = named_files(ROOT / "docs/python.md")["loop.py"]
    assert len(loop.splitlines()) <= 20
    lines = output_of(loop, recipes)
    assert "".join(lines).count("dtype=int32") == "".join(lines).count("dtype=float32") == 4
    assert (recipes / "output/loop/policy/trainer_state.json").is_file()


@pytest.mark.matrix
@pytest.mark.e2e
def test_the_notebook(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executed by a kernel, whose event loop runs in the thread of its cells."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("MPLBACKEND")  # of the tests; a kernel draws into its cells
    notebook = nbformat.read(recipes / "examples/notebook.ipynb", nbformat.NO_CONVERT)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(recipes / "examples")}}).execute()
    said = ["".join(str(one) for one in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert len(said) == 7
    _, _, checked, ran, drawn, table, files = said
    assert "12 steps" in checked
    assert "step 11: reward" in ran
    assert "image/png" in drawn
    assert "score" in table
    assert "seed0/report.html" in files
