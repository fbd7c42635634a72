"""Faults of other projects' pipelines on given rows, of their distillation and their evaluation, each with a test that
it is none here; numbers are those of the tables in ``docs/verification.md``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from tokenizers.processors import TemplateProcessing

from roll.algorithms.preferences import PairSums, preference_loss
from roll.config.losses import PreferenceLossConfig
from roll.config.roles import DataArguments
from roll.datasets.preferences import JudgedColumns, JudgedDataset
from roll.evaluate import load_evaluation
from roll.methods.base import Ask
from roll.methods.opd_keys import TeacherConfig
from roll.methods.preferences import PairLoss, pair_batch
from roll.methods.rows import demonstration_batch
from roll.models.layouts import tree_layout
from roll.pipelines.clusters import Scorers
from roll.pipelines.evaluate.config import models_of
from roll.pipelines.evaluate.pipeline import EvaluatePipeline
from roll.pipelines.rlvr.definition import OPDConfig
from roll.pipelines.rows import RowsPipeline
from roll.protocol import DataProto
from roll.protocol.metrics import Mean
from roll.workers.model import ModelWorker, TrainWorker
from tests.agents.templates import CHATML
from tests.agents.tiny import make_tokenizer
from tests.config.good import GONE, TEACHER, changed, load, opd
from tests.pipelines.in_process import Here, TokenModel, prepare, run_here, worker_on
from tests.pipelines.test_teaching import TEACHERS, Teacher, scored
from tests.support.keys import config_of
from tests.support.tiny_runs import (
    NUM_PROBLEMS,
    NUM_VALIDATION,
    TinyWorld,
    distill_settings,
    dpo_settings,
    load_changed,
    sft_settings,
    training_args,
)

POLICY, REFERENCE = 1, 2
"""Seeds of the two models."""
Make = Callable[..., Any]


@pytest.fixture
def dpo(world: TinyWorld, tmp_path: Path) -> Make:
    """``dpo(key=value)``: a pipeline whose clusters are here."""

    def make(**changes: Any) -> RowsPipeline:
        pipeline = RowsPipeline(load_changed(dpo_settings(world, tmp_path), changes))
        learner = Here("actor_train", worker_on(TrainWorker, None, POLICY))
        return prepare(pipeline, learner, Here("reference", worker_on(ModelWorker, None, REFERENCE)))

    return make


@pytest.fixture
def sft(world: TinyWorld, tmp_path: Path) -> Make:
    def make(**changes: Any) -> RowsPipeline:
        pipeline = RowsPipeline(load_changed(sft_settings(world, tmp_path), changes))
        return prepare(pipeline, Here("sft_train", worker_on(TrainWorker, None, POLICY)))

    return make


@pytest.fixture
def distill(world: TinyWorld, tmp_path: Path) -> Make:
    """The teacher's columns are zeros, and the student's loss is the number of its updates."""

    def make(**changes: Any) -> RowsPipeline:
        pipeline = RowsPipeline(load_changed(distill_settings(world, tmp_path), changes))
        pipeline.method.open()

        def teach(name: str, batch: DataProto, ask: Ask) -> DataProto:
            log_probs = torch.zeros(*batch.batch["input_ids"].shape, ask.top.count)
            columns = {"top_log_probs": log_probs, "top_ids": log_probs.int(), "tail_log_prob": log_probs[..., 0]}
            return DataProto.from_dict(columns)

        student = Here("student", compute=lambda *_: {"student/loss": Mean(1.0)})
        return prepare(pipeline, student, Here("teacher", compute=teach))

    return make


def by_hand(pipeline: RowsPipeline, rows: Any) -> PairSums:
    """One response at a time, in float64."""
    sums: dict[str, list[Any]] = {"policy": [], "reference": [], "lengths": []}
    for row in rows:
        for name, seed in (("policy", POLICY), ("reference", REFERENCE)):
            table = TokenModel(seed).log_prob_of.double()
            sums[name].append([float(sum(table[token] for token in ids)) for ids in row.responses])
        sums["lengths"].append([len(ids) for ids in row.responses])
    return PairSums(**{name: torch.tensor(values, dtype=torch.float64) for name, values in sums.items()})


# DPO


@pytest.mark.parametrize("keys", [{"beta": 0.5}, {"beta": 0.5, "ipo": True}, {"beta": 0.5, "label_smoothing": 0.2}])
def test_dpo_01_beta_ipo_and_label_smoothing_have_no_effect(dpo: Make, keys: dict[str, Any]) -> None:
    pipeline = dpo(**keys)
    rows = list(pipeline.training)[:8]
    pipeline.rows.next_batch = lambda count: rows
    pipeline.update(pipeline.next_batch(0))
    sums = by_hand(pipeline, rows)
    ratios = sums.policy - sums.reference
    lead, share = ratios[:, 0] - ratios[:, 1], keys.get("label_smoothing", 0.0)
    wanted = -(1 - share) * F.logsigmoid(0.5 * lead) - share * F.logsigmoid(-0.5 * lead)
    if "ipo" in keys:
        means = ratios / sums.lengths
        wanted = (means[:, 0] - means[:, 1] - 1.0) ** 2
    assert pipeline.context.recorded()["actor/loss"] == pytest.approx(float(wanted.mean()), rel=1e-5)


def test_dpo_02_validation_reports_its_last_batch_at_a_fixed_beta(dpo: Make, world: TinyWorld) -> None:
    """64 pairs, 5 at a time: the mean over all of them, with the loss that is configured."""
    held_out = {"data_args": {"file_name": str(world.preferences)}}
    pipeline = dpo(**{"validation": held_out, "actor_train.infer_batch_size": 5, "beta": 0.7})
    sums = by_hand(pipeline, pipeline.held_out)
    wanted = preference_loss(sums, PreferenceLossConfig(beta=0.7))
    found = pipeline.method.measure(pipeline.held_out, pipeline)
    assert found["val/loss"] == pytest.approx(float(wanted.mean()), rel=1e-5)
    lead = sums.policy - sums.reference
    assert found["val/acc"] == pytest.approx(float((lead[:, 0] > lead[:, 1]).double().mean()))
    sizes = [len(batch) // 2 for batch in pipeline.learner.batches("forward")]
    assert sizes == [5] * 12 + [4]


def test_dpo_04_a_file_name_is_read_letter_by_letter(dpo: Make, world: TinyWorld) -> None:
    one, listed = (
        dpo(**{"actor_train.data_args.file_name": name}) for name in (str(world.preferences), [str(world.preferences)])
    )
    assert len(one.training) == len(listed.training) == NUM_PROBLEMS
    assert [row.row_id for row in one.training] == [row.row_id for row in listed.training]


def judged(tokenizer: Any, folder: Path, *rows: dict[str, Any]) -> JudgedDataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JudgedDataset.build(DataArguments(file_name=str(file)), tokenizer, 200, JudgedColumns(), "pairs")


def test_dpo_05_a_mask_counted_on_text_and_special_tokens_twice(tmp_path: Path) -> None:
    """The assistant's header is no response, nothing merges over its end, and text begins with one token of its own."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    assert tokenizer("a")["input_ids"][0] == begin, "the tokenizer adds it wherever it is asked for special tokens"
    (row,) = judged(tokenizer, tmp_path, {"instruction": "hello", "chosen": "\n\nLeft", "rejected": "world"})
    header = "<|im_start|>assistant\n"
    assert tokenizer.decode(row.prompt_ids).endswith(header) and row.prompt_ids.count(begin) == 1
    assert [tokenizer.decode(ids) for ids in row.responses] == [
        f"{text}{tokenizer.eos_token}" for text in ("\n\nLeft", "world")
    ]
    batch = pair_batch([row], 0).batch
    for side, ids in zip(batch["input_ids"], row.responses, strict=True):
        mask = batch["response_mask"][0 if ids is row.responses[0] else 1]
        assert side[mask].tolist() == ids


def test_dpo_06_one_turn_without_a_system_prompt_and_pairs_that_vanish(
    dpo: Make, world: TinyWorld, tmp_path: Path
) -> None:
    turns = [("system", "Be short."), ("user", "2 + 2?"), ("assistant", "4"), ("user", "Sure?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    rows = [
        {"messages": messages, "chosen": "Yes", "rejected": "No"},
        {"messages": messages, "chosen": "Yes " * 100, "rejected": "No"},
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pipeline = dpo(**{"actor_train.data_args": {"file_name": str(file), "messages": "messages"}})
    (row,) = pipeline.training
    text = pipeline.tokenizer.decode(row.prompt_ids)
    places = [text.index(said) for _, said in turns]
    assert places == sorted(places)
    assert pipeline.context.recorded()["data/dropped_pairs"] == 1


def test_dpo_07_rows_as_long_as_the_limit_and_prompts_computed_twice(dpo: Make) -> None:
    pipeline = dpo(sequence_length=400, **{"actor_train.use_prefix_sharing": True})
    rows = list(pipeline.training)[:4]
    columns = pair_batch(rows, pipeline.pad_token_id).batch
    assert columns["input_ids"].shape[1] == max(len(side) for row in rows for side in row.sides)
    layout = tree_layout(columns["input_ids"], columns["response_mask"])
    computed = sum(len(row.prompt_ids) + sum(map(len, row.responses)) for row in rows)
    # The last token of a response predicts nothing that counts.
    assert layout.input_ids.numel() <= computed < int(columns["attention_mask"].sum())


def test_dpo_08_micro_batches_weigh_equally_whatever_they_hold(dpo: Make) -> None:
    pipeline = dpo()
    batch = pipeline.next_batch(0)
    model, options = TokenModel(POLICY), PreferenceLossConfig(beta=0.3)

    def share(part: DataProto) -> float:
        totals = {"pairs": torch.tensor(8.0)}
        return float(PairLoss(options)(model.forward(part.batch, ()), part.batch, totals)[0])

    whole = share(batch)
    assert sum(share(batch[begin:end]) for begin, end in ((0, 2), (2, 12), (12, 16))) == pytest.approx(whole, rel=1e-6)
    sums = by_hand(
        pipeline, [row for row in pipeline.training if row.row_id in pipeline.method.reference_cache["train"]]
    )
    assert whole == pytest.approx(float(preference_loss(sums, options).mean()), rel=1e-5)


def test_dpo_09_the_reference_computes_every_epoch_anew(dpo: Make) -> None:
    pipeline = dpo()
    seen = []
    for step in range(16):
        batch = pipeline.next_batch(step)
        seen.append((batch.batch["input_ids"], batch.batch["ref_log_probs"]))
    assert pipeline.frozen.names() == ["forward"] * 8
    table = TokenModel(REFERENCE).log_prob_of
    for ids, column in seen:
        assert torch.equal(column, table[ids] * (column != 0))


def test_dpo_11_an_adapter_loads_a_second_model_as_its_reference(world: TinyWorld, tmp_path: Path) -> None:
    settings = dpo_settings(world, tmp_path)
    assert "reference" in load_changed(settings, {}).plan.roles
    lora = {"actor_train.model_args.lora_target": "all-linear", "actor_train.model_args.lora_rank": 4}
    assert "reference" not in load_changed(settings, lora | {"reference": None}).plan.roles
    for written in ({}, {"reference.model_args.adapter_name_or_path": "adapter"}):
        assert "reference" in load_changed(settings, lora | written).plan.roles, "a section is never taken for absent"


# Distillation


def test_distill_03_the_teachers_vocabulary_ends_before_added_tokens(distill: Make, world: TinyWorld) -> None:
    """All ids of the models, not the tokenizer's ``vocab_size``, which leaves added tokens out."""
    pipeline = distill()
    sizes = [json.loads((folder / "config.json").read_text())["vocab_size"] for folder in (world.model, world.teacher)]
    assert pipeline.method.limit == min(sizes) >= len(pipeline.tokenizer)
    assert pipeline.tokenizer.eos_token_id < pipeline.method.limit
    asked: list[int] = []
    pipeline.frozen._compute = lambda name, batch, ask: (
        asked.append(ask.top.limit)
        or DataProto.from_dict(
            {
                name: torch.zeros(len(batch), batch.batch["input_ids"].shape[1])
                for name in ("top_log_probs", "top_ids", "tail_log_prob")
            }
        )
    )
    pipeline.next_batch(pipeline.num_steps - 1)
    assert asked == [pipeline.method.limit]


def test_distill_08_steps_without_the_ranks_and_a_last_model_by_luck(
    distill: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, 4 rows each, two micro-batches: 16 rows a step; without ``max_steps`` the epochs' last model is saved
    and exported, by the driver that DPO and SFT have as well."""
    arguments = training_args(4, 2) | {"num_train_epochs": 1.5, "save_hf_model": True}
    changes = {
        "save_steps": 6,
        "student.device_mapping": [0, 1],
        "teacher.device_mapping": [0],
        "student.training_args": arguments,
    }
    pipeline = distill(max_steps=GONE, **changes)
    assert (pipeline.plan.global_batch_size, pipeline.num_steps) == (16, 6)
    saved: list[int] = []
    monkeypatch.setattr(pipeline, "save", lambda steps, state: saved.append(steps))
    assert run_here(pipeline, monkeypatch)[1] == [6]
    assert saved == [6] and pipeline.learner.names().count("step") == 6


def test_distill_09_a_prompt_searched_in_the_tokens_of_its_answer(
    distill: Make, world: TinyWorld, tmp_path: Path
) -> None:
    """Answers that say the prompt again, and one that is too long: masks begin behind the prompt, and it is counted."""
    question = "How many eggs?"
    rows = [{"question": question, "answer": text} for text in (question, f"{question} 12", "12 " * 200)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pipeline = distill(**{"student.data_args": {"file_name": str(file)}})
    assert pipeline.context.recorded()["data/dropped_rows"] == 1
    columns = demonstration_batch(list(pipeline.training), pipeline.pad_token_id).batch
    sides = zip(columns["input_ids"], columns["response_mask"], strict=True)
    learned = [pipeline.tokenizer.decode(ids[mask]) for ids, mask in sides]
    end = pipeline.tokenizer.eos_token
    assert learned == [f"{question}{end}", f"{question} 12{end}"]


def test_distill_10_a_call_for_every_tensor_and_prints_every_step(
    distill: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = distill(max_steps=3)
    run_here(pipeline, monkeypatch)
    assert pipeline.frozen.names() == ["forward"] * 3
    assert pipeline.learner.names() == ["step"] * 3
    assert capsys.readouterr().out.count("top_") == 0


def test_cached_rows_are_those_of_the_step_alone(distill: Make, world: TinyWorld, tmp_path: Path) -> None:
    held_out = {"data_args": {"file_name": str(world.validation_answers)}}
    pipeline = distill(teacher_cache=str(tmp_path / "cache"), validation=held_out)
    for _ in range(2):  # the second time the cache has all of them
        pipeline.method.measure(pipeline.held_out, pipeline)
    assert "student/cached_rows" not in pipeline.context.recorded()
    pipeline.next_batch(0)
    assert pipeline.context.recorded()["student/cached_rows"] == 0.0


def test_distill_11_conversations_are_checked_and_then_ignored(distill: Make, tmp_path: Path) -> None:
    said = [("user", "2 + 2?"), ("assistant", "4"), ("user", "Sure?"), ("assistant", "Yes")]
    row = {"conversation": [{"role": role, "content": text} for role, text in said]}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    pipeline = distill(**{"student.data_args": {"file_name": str(file), "messages": "conversation"}})
    (one,) = pipeline.training
    assert pipeline.tokenizer.decode(one.input_ids[one.prompt_length :]) == f"Yes{pipeline.tokenizer.eos_token}"
    assert "Sure?" in pipeline.tokenizer.decode(one.input_ids[: one.prompt_length])


def test_distill_12_teacher_and_student_wait_for_each_other(distill: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher with devices of its own is asked for the next rows before the student learns from these; one that
    shares them is not."""
    order: list[str] = []
    for devices, wanted in (([1], "TTSTSS"), ([0], "TSTSTS")):
        pipeline = distill(max_steps=3, **{"teacher.device_mapping": devices})
        for cluster, letter in ((pipeline.frozen, "T"), (pipeline.learner, "S")):
            compute = cluster._compute
            cluster._compute = lambda *args, compute=compute, letter=letter, **keys: (
                order.append(letter) or compute(*args, **keys)
            )
        run_here(pipeline, monkeypatch)
        assert "".join(order) == wanted
        order.clear()


# SFT


def test_sft_02_an_epoch_is_finished_whatever_max_steps_says(sft: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = sft(max_steps=3)
    run_here(pipeline, monkeypatch)
    assert pipeline.learner.names() == ["step"] * 3


def test_sft_03_rows_come_in_the_order_of_the_file(sft: Make) -> None:
    pipeline = sft()
    in_file = [row.row_id for row in pipeline.training]
    epochs = [[row.row_id for row in pipeline.rows.next_batch(NUM_PROBLEMS)] for _ in range(2)]
    assert all(sorted(epoch) == sorted(in_file) for epoch in epochs)
    assert in_file != epochs[0] != epochs[1]


def test_sft_06_the_validation_loss_is_a_list_of_sums(
    sft: Make, world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 rows, 3 at a time: one number, the mean over the tokens of all, after the steps that say so and not before."""
    held_out = {"data_args": {"file_name": str(world.validation_answers)}}
    pipeline = sft(max_steps=4, eval_steps=2, validation=held_out, **{"sft_train.infer_batch_size": 3})
    validations, _ = run_here(pipeline, monkeypatch)
    assert pipeline.learner.names() == (["step"] * 2 + ["measure"] * 3) * 2
    sizes = [len(batch) for batch in pipeline.learner.batches("measure")]
    assert sizes == [3, 3, 2] * 2 and sum(sizes) == 2 * NUM_VALIDATION
    table = TokenModel(POLICY).log_prob_of.double()
    losses = [-float(table[token]) for row in pipeline.held_out for token in row.input_ids[row.prompt_length :]]
    assert list(validations) == [2, 4]
    assert validations[2] == {"val/loss": pytest.approx(np.mean(losses), rel=1e-5)}


# On-policy distillation


def test_opd_05_what_is_done_to_rewards_looks_effective_in_pure_mode(tmp_path: Path) -> None:
    keys = {"norm_mean_type": "group", "norm_std_type": "group", "reward_clip": 1.0, "add_token_level_kl": True}
    notes = {notice.key: notice.text for notice in load(tmp_path, opd(**keys)).warnings}
    assert all("nothing is learnt from them" in notes[key] for key in keys)
    mixed = changed({**keys, "use_opd": True, "teacher": TEACHER})
    assert not keys.keys() & {notice.key for notice in load(tmp_path, mixed).warnings}, (
        "where rewards teach, they count"
    )


def test_opd_07_a_clamped_estimate_hides_how_far_the_teacher_is() -> None:
    """Of any estimator: the metric is the mean log-ratio, in which nothing is clamped."""
    teacher: Any = Teacher(-30.0)
    for estimator in ("k1", "k3"):
        batch, metrics = scored(config_of(OPDConfig, teacher=TEACHERS, kl_penalty=estimator), {"teacher": teacher})
        mask = batch.batch["response_mask"]
        ratio = float(((batch.batch["old_log_probs"] + 30.0) * mask).sum() / mask.sum())
        assert metrics["opd/teacher/kl"] == pytest.approx(ratio) and ratio > 10


@pytest.mark.parametrize(
    ("devices", "order"), [([[0], [1]], "call call result result"), ([[0], [0]], "call result call result")]
)
def test_opd_09_one_teacher_after_the_other(devices: list[list[int]], order: str) -> None:
    """Those without a device in common compute concurrently; nothing else changes."""
    happened: list[str] = []

    class Watched(Teacher):
        def call(self, *args: Any, **keys: Any) -> Teacher:
            happened.append("call")
            return super().call(*args, **keys)

        def result(self) -> DataProto:
            happened.append("result")
            return super().result()

    sections = {str(n): TeacherConfig(device_mapping=mapping) for n, mapping in enumerate(devices)}
    teachers: Any = {name: Watched(-1.0 - int(name)) for name in sections}
    batch, metrics = scored(config_of(OPDConfig, teacher=sections), teachers)
    assert happened == order.split()
    mask, own = batch.batch["response_mask"], batch.batch["old_log_probs"]
    torch.testing.assert_close(batch.batch["teacher_kl"], (2 * own + 3.0) * mask)
    assert metrics["opd/1/teacher_log_prob"] == pytest.approx(-2.0)


# Evaluation


def test_evaluate_02_a_training_section_gives_columns_and_template(tmp_path: Path) -> None:
    """A file without anything that learns, and one whose training rows are not there."""
    (tmp_path / "val.jsonl").write_text("{}\n")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    own = {"pretrain": str(tmp_path), "validation.data_args.file_name": str(tmp_path / "val.jsonl")}
    alone = {"validation.data_args.prompt": "question", "actor_train": GONE, "reference": GONE}
    for changes, column in ((alone, "question"), ({}, None)):
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(changed({**own, **changes})))
        plan: Any = load_evaluation(str(file), None, [], {}).plan
        assert [one.data_args.prompt for one in plan.validation_sets] == [column]


def test_evaluate_03_one_deadline_for_the_whole_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``rpc_timeout`` begins anew whenever prompts are done; so many are in flight, however many there are."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(changed({"rpc_timeout": 5.0, "val_batch_size": 3})))
    loaded = load_evaluation(str(file), None, [], {}, check_files=False)
    deadlines, open_at_once = list[float](), list[int]()

    class Flow:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.next_order, self.in_flight = 0, list[int]()

        def start(self, count: int) -> None:
            self.in_flight += [self.next_order] * count

        async def progress(self, seconds: float) -> Any:
            deadlines.append(seconds)
            open_at_once.append(len(self.in_flight))
            self.in_flight.pop()
            return []

        async def abort(self) -> None:
            pass

    monkeypatch.setattr("roll.pipelines.evaluate.pipeline.GroupFlow", Flow)
    pipeline = EvaluatePipeline(loaded)
    pipeline.prompts, pipeline.scorers = {"": range(20)}, Scorers()  # type: ignore[dict-item]
    (model, way) = next(models_of(loaded.config, loaded.config.evaluate)), pipeline.plan.passes[0]
    asyncio.run(pipeline.answer(model, way, range(20), None))  # type: ignore[arg-type]
    assert deadlines == [5.0] * 20 and max(open_at_once) == 3
