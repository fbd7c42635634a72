"""A pipeline of a user's own, and a method on given rows (a class with keys, loss and batch), each named in YAML by its
dotted path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

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
from roll.datasets import SftDataset, SftRow
from roll.methods.base import MODEL_COLUMNS, Loss, Totals
from roll.methods.rows import RowMethod, demonstration_batch
from roll.methods.supervised import SupervisedConfig, SupervisedDefinition
from roll.pipelines.run_lifetime import RunLifetime
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import Output, TensorBatch
from tests.support.tiny_runs import FinishedRun, TinyWorld, let_go_of_process, role, training_args

pytestmark = pytest.mark.long

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


@dataclass(frozen=True)
class SmoothedConfig(SupervisedConfig):
    """Imitation in which early tokens of a response count less."""

    pretrain: str = ""
    ramp: int = setting(8, ge=1)
    """Tokens until a token counts fully."""
    imitator: WorkerConfig = field(default_factory=WorkerConfig)


class Smoothed(SupervisedDefinition):
    """Definition of the method."""

    name = "smoothed"
    config_class = SmoothedConfig
    role = "imitator"
    method_class = f"{HERE}.SmoothedImitation"
    roles = (Role("imitator", TRAINS),)
    headlines = (Headline("imitator/loss", "loss"),)


@dataclass(frozen=True)
class WeightedNll(Loss):
    """The weighted mean of -log pi(y_t | y_<t) over all ranks."""

    prefix: str = field(default="imitator/", kw_only=True)
    columns = (*MODEL_COLUMNS, "weights")

    def counts(self, batch: TensorBatch) -> Totals:
        return {"weight": batch["weights"].double().sum()}

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        nll = -(outputs[Output.LOG_PROBS] * batch["weights"]).sum()
        return nll / float(totals["weight"]), {f"{self.prefix}loss": Mean(float(nll), float(batch["weights"].sum()))}


class SmoothedImitation(RowMethod[SmoothedConfig, SftRow]):
    """All that the run asks of a method."""

    stream = "smoothed"
    state_key = "rows"
    loss = WeightedNll()

    @classmethod
    def data_set(cls, config: SmoothedConfig) -> Callable[..., SftDataset]:
        return SftDataset.build

    def batch(self, rows: Sequence[SftRow], pad: int, ranks: int = 1) -> DataProto:
        batch = demonstration_batch(rows, pad)
        mask = batch.batch["response_mask"]
        batch.batch["weights"] = (mask.cumsum(1) / self.config.ramp).clamp(max=1.0) * mask
        return batch


def written_file(world: TinyWorld, output: Path, pipeline: str = "Watched", **changes: Any) -> Path:
    data = {"file_name": str(world.demonstrations), "messages": "messages", "response": "response"}
    learner = role("fsdp2_train", [0], training_args=training_args(4, 2), data_args=data)
    own = {"imitator": learner} if pipeline == "Smoothed" else {"pupil": learner, "onlooker": role("fsdp2_infer", [1])}
    settings = {
        "pipeline": f"{HERE}.{pipeline}",
        "exp_name": "own",
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
    }
    file = output / "own.yaml"
    file.write_text(yaml.safe_dump(settings | own | changes))
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
    assert cli.main(["check", str(written_file(world, tmp_path)), f"pipeline={path}"]) == 2
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


@pytest.fixture
def finished(
    request: pytest.FixtureRequest, world: TinyWorld, tmp_path: Path, shared_ray: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FinishedRun]:
    """A run of the parameter's pipeline and keys."""
    pipeline, changes = request.param
    validation = {"data_args": {"file_name": str(world.validation_answers)}}
    own = {"validation": validation} if pipeline == "Smoothed" else {}
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)
    assert cli.main(["run", str(written_file(world, tmp_path, pipeline, **changes, **own))]) == 0
    yield FinishedRun(tmp_path)
    let_go_of_process()


@pytest.mark.e2e
@pytest.mark.parametrize("finished", [("Watched", {})], indirect=True, ids=[""])
def test_run(finished: FinishedRun) -> None:
    steps = finished.steps
    assert [row["system/global_step"] for row in steps] == [0, 1]
    # Both models are the same before the first update, which the onlooker does not see.
    assert steps[0]["onlooker/nll"] == pytest.approx(steps[0]["sft_train/loss"], rel=1e-5)
    assert steps[1]["onlooker/nll"] != pytest.approx(steps[1]["sft_train/loss"], rel=1e-5)
    assert all(row["time/imitate"] > 0 for row in steps)
    assert "Surprise" in (finished.output / "record/run.json").read_text()


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize(
    "finished", [("Smoothed", {"max_steps": 3, "save_steps": 2, "eval_steps": 2})], indirect=True, ids=[""]
)
def test_a_method_trains_and_evaluates(finished: FinishedRun) -> None:
    losses = finished.values("imitator/loss")
    assert len(losses) == 3 and 0 < losses[2] < losses[0]
    validations = [row["val/loss"] for row in finished.with_metric("val/loss")]
    assert len(validations) == 2 and validations[1] < validations[0]
    assert (finished.output / "checkpoints" / "checkpoint-2").is_dir()


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


def test_weights_rise_from_the_first_token_of_a_response() -> None:
    row = SftRow("0", None, list(range(10)), 6)
    method: Any = SmoothedImitation.__new__(SmoothedImitation)
    method.config = SmoothedConfig(ramp=2)
    weights = method.batch([row], 0).batch["weights"]
    assert torch.equal(weights, torch.tensor([[0.0] * 6 + [0.5, 1.0, 1.0, 1.0]]))
