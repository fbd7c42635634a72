"""A pipeline of a user's own, named in YAML by its dotted path."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from roll import cli
from roll.config.checks.base import Checks, check_data_files
from roll.config.checks.roles import check_roles
from roll.config.loader import LoadedConfig, load_config
from roll.config.pipelines import (
    COMPUTES_LOG_PROBS,
    TRAINS,
    Headline,
    Panel,
    PipelineDefinition,
    ReadableSet,
    Role,
    Written,
)
from roll.config.plan.plan import Plan
from roll.config.plan.planning import shared_plan, training_plan
from roll.config.reading.fields import setting
from roll.config.roles import ReferenceWorkerConfig, WorkerConfig
from roll.config.run import RunConfig
from roll.datasets import SftDataset
from roll.methods.rows import demonstration_batch
from roll.pipelines.run_lifetime import RunLifetime
from roll.protocol.metrics import Mean
from tests.support.tiny_runs import FinishedRun, TinyWorld, role, training_args

HERE = "tests.pipelines.test_own_pipeline"


@dataclass(frozen=True)
class WatchedConfig(RunConfig):
    """A model learns while another one looks on."""

    pretrain: str = ""
    max_steps: int = setting(2, ge=1)
    sequence_length: int = setting(64, ge=2)
    pupil: WorkerConfig = field(default_factory=WorkerConfig)
    onlooker: ReferenceWorkerConfig = field(default_factory=ReferenceWorkerConfig)


class Watched(PipelineDefinition):
    """Imitation, with the log-probs of a second model as a metric."""

    name = "watched"
    config_class = WatchedConfig
    roles = (Role("pupil", TRAINS), Role("onlooker", COMPUTES_LOG_PROBS))
    headlines = (Headline("onlooker/nll", "surprise"),)
    panels = (Panel("Surprise", ("onlooker/nll",)),)

    def check(self, config: WatchedConfig, checks: Checks) -> None:
        check_roles(config, checks)
        check_data_files("pupil.data_args", config.pupil.data_args, checks)

    def plan(self, config: WatchedConfig, exp_name: str, written: Written) -> Plan:
        learning = training_plan(config.pupil, config.sequence_length, 0, 1, config.max_steps)
        shared = shared_plan(self, config, exp_name, written)
        return Plan(**shared, training={"pupil": learning}, max_steps=config.max_steps, eval_steps=0)

    def readable_sets(self, loaded: LoadedConfig[WatchedConfig]) -> dict[str, ReadableSet]:
        data, length = loaded.config.pupil.data_args, loaded.config.sequence_length
        return {"train": ReadableSet("train", data, length, lambda tokenizer: demonstrations(loaded.config, tokenizer))}

    def run(self, loaded: LoadedConfig[WatchedConfig]) -> None:
        from roll.distributed import Cluster
        from roll.methods.sft import SftLoss
        from roll.pipelines.files import load_tokenizer, pad_token_id
        from roll.pipelines.run_context import RunContext
        from roll.workers import REFERENCE_WORKER, TRAIN_WORKER
        from roll.workers.model import ModelWorker, TrainWorker

        config, plan, context = loaded.config, loaded.plan, RunContext(loaded)
        tokenizer = load_tokenizer(plan.roles["pupil"].model_path, trust_remote_code=False)
        rows = demonstrations(config, tokenizer)
        size = plan.training["pupil"].mini_batch_size
        with context.running() as resources:
            workers = {"pupil": TRAIN_WORKER, "onlooker": REFERENCE_WORKER}
            clusters = {
                name: Cluster(name, workers[name], resources, role.section, seed=config.seed)
                for name, role in plan.roles.items()
            }
            context.watch(list(clusters.values()))
            for name, cluster in clusters.items():
                cluster.call_all(ModelWorker.initialize, config.max_steps if name == "pupil" else 0).result()
            for step in context.steps(0, config.max_steps):
                batch = demonstration_batch(rows[step * size : (step + 1) * size], pad_token_id(tokenizer))
                with context.phase("imitate"):
                    seen = clusters["onlooker"].call(ModelWorker.forward, batch).result().batch["log_probs"]
                    tokens = float(batch.batch["response_mask"].sum())
                    context.record({"onlooker/nll": Mean(-float(seen.sum()), tokens)})
                    context.record(clusters["pupil"].call(TrainWorker.step, batch, SftLoss()).result())
                context.end_step(step)
            context.finish(config.max_steps)


def demonstrations(config: WatchedConfig, tokenizer: Any) -> Any:

    return SftDataset.build(config.pupil.data_args, tokenizer, config.sequence_length)


def written_file(world: TinyWorld, output: Path, **changes: Any) -> Path:
    data = {"file_name": str(world.demonstrations), "messages": "messages", "response": "response"}
    settings = {
        "pipeline": f"{HERE}.Watched",
        "exp_name": "watched",
        "seed": 7,
        "pretrain": str(world.model),
        "output_dir": str(output),
        "logging_dir": str(output / "logs"),
        "track_with": ["jsonl"],
        "num_gpus_per_node": 2,
        "save_steps": 0,
        "memory_steps": 0,
        "rpc_timeout": 120,
        "sequence_length": 160,
        "pupil": role("fsdp2_train", [0], training_args=training_args(4, 2), data_args=data),
        "onlooker": role("fsdp2_infer", [1]),
    }
    file = output / "watched.yaml"
    file.write_text(yaml.safe_dump(settings | changes))
    return file


def test_check_shows_its_plan_and_its_mistakes(
    world: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(written_file(world, tmp_path))
    assert cli.main(["check", file]) == 0
    text = capsys.readouterr().out
    assert "watched pipeline, 1 node x 2 devices" in text and "1 optimizer step" not in text.partition("steps ")[0]
    assert all(name in text for name in ("pupil", "onlooker", "fsdp2_infer", "1 rank x 2 micro-batches of 4"))
    assert cli.main(["check", file, "onlooker.strategy_args.strategy_name=hf_nothing", "pupill=1"]) == 2
    assert "unknown key; the nearest known one is pupil" in capsys.readouterr().err
    assert cli.main(["check", file, "pupil.strategy_args.strategy_name=vllm"]) == 2
    assert "pupil trains; that needs fsdp2_train" in capsys.readouterr().err
    assert cli.main(["inspect-data", file, "--rows", "1"]) == 0
    assert "sft-0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        (f"{HERE}.Nobody", "cannot be imported"),
        ("no_such_module.Pipeline", "No module named 'no_such_module'"),
        (f"{HERE}.WatchedConfig", "must be a subclass of roll.config.pipelines.PipelineDefinition"),
        ("roll.config.pipelines.PipelineDefinition", "is not complete: it has no check, plan, run"),
    ],
)
def test_a_path_that_is_no_pipeline(
    world: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, rule: str
) -> None:
    assert cli.main(["check", str(written_file(world, tmp_path, pipeline=path))]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert rule in message and "pipeline" in message and "my_module.MyPipeline" in message


def test_a_pipeline_of_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = f"from {HERE} import Watched\n\nclass Mine(Watched):\n    name = 'mine'\n"
    Path("mine_of_the_folder.py").write_text(own)
    section = {"device_mapping": [0], "data_args": {"file_name": "rows.jsonl"}}
    settings = {"pipeline": "mine_of_the_folder.Mine", "pretrain": "owner/model", "pupil": section}
    settings["onlooker"] = {"device_mapping": [1]}
    Path("mine.yaml").write_text(yaml.safe_dump(settings))
    assert cli.main(["check", "mine.yaml", "--skip-files"]) == 0, capsys.readouterr().err
    assert "mine pipeline" in capsys.readouterr().out


def test_run(world: TinyWorld, tmp_path: Path, shared_ray: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written_file(world, tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)
    with logging_restored():
        assert cli.main(["run", str(file)]) == 0
    steps = FinishedRun(tmp_path).steps
    assert [row["system/global_step"] for row in steps] == [0, 1]
    # Both models are the same before the first update, which the onlooker does not see.
    assert steps[0]["onlooker/nll"] == pytest.approx(steps[0]["sft_train/loss"], rel=1e-5)
    assert steps[1]["onlooker/nll"] != pytest.approx(steps[1]["sft_train/loss"], rel=1e-5)
    assert all(row["time/imitate"] > 0 for row in steps)
    assert "Surprise" in (tmp_path / "record/run.json").read_text()


def test_the_end_of_a_run_reaches_all_hooks_and_clusters_whichever_raises(world: TinyWorld, tmp_path: Path) -> None:
    lifetime = RunLifetime(load_config(None, written_file(world, tmp_path)), lambda metrics: None)
    ended: list[Any] = []

    def full_disk() -> None:
        raise OSError("no space left")

    lifetime.at_end(full_disk)
    lifetime.at_end(lambda: ended.append("hook"))
    cluster: Any = SimpleNamespace(shutdown=lambda graceful: ended.append(graceful))
    lifetime.watch([cluster])
    with pytest.raises(OSError, match="no space"):
        lifetime._shut_down(graceful=True)
    assert ended == ["hook", True]


@contextmanager
def logging_restored() -> Iterator[None]:
    yield
    package = logging.getLogger("roll")
    for handler in list(package.handlers):
        package.removeHandler(handler)
    package.propagate = True
    os.environ.pop("RAY_ADDRESS", None)
