"""Whole recipes: phases, what does not fit and what would, and the recipes for real models at their full size."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rehearsal import PAGE, RECIPES, recipe_row
from roll.cli import main
from roll.config.loader import load_config
from roll.config.roles import StrategyArguments, TrainingArguments
from roll.models.patterns import VarlenCall
from roll.rehearsal.catalog import Gpu, Hardware
from roll.rehearsal.command import to_json, verdict
from roll.rehearsal.recipe import Rehearsal, rehearse_recipe
from roll.rehearsal.simulate import rehearse
from roll.rehearsal.stand_ins import pairs
from roll.rehearsal.suggestions import candidates, suggest
from roll.rehearsal.tracker import Kind
from roll.strategies.base import ModelHead, StateKind
from tests.rehearsal.test_execution import (
    CONFIG,
    HIDDEN,
    LAYERS,
    MATRICES,
    PROMPT,
    RANKS,
    RESPONSE,
    ROWS,
    VOCABULARY,
    task_of,
)

pytestmark = pytest.mark.long


def test_recomputation_trades_activations_for_a_forward_pass(tmp_path: Path) -> None:
    task = task_of(tmp_path, forward_rows=0, sends=False)
    args = replace(task.role.model_args, disable_gradient_checkpointing=False)
    kept = rehearse(task).works["train"]
    again = rehearse(replace(task, role=replace(task.role, model_args=args))).works["train"]
    assert again.peak[Kind.ACTIVATIONS] < kept.peak[Kind.ACTIVATIONS]
    tokens = PROMPT + RESPONSE
    layer = (2 * MATRICES * tokens) // LAYERS + 2 * HIDDEN * tokens * tokens
    assert 0 < again.flops - kept.flops <= 2 * ROWS * LAYERS * layer


def test_a_reward_model_has_no_vocabulary_to_compute(tmp_path: Path) -> None:
    task = task_of(tmp_path, forward_rows=0, sends=False, updates=1, rows_per_update=1)
    language, reward = (rehearse(replace(task, head=head)).works["train"] for head in (task.head, ModelHead.SCORE))
    saved = 3 * 2 * VOCABULARY * HIDDEN * RESPONSE
    scores = 3 * 2 * HIDDEN * (PROMPT + RESPONSE)
    assert saved - scores <= language.flops - reward.flops <= saved


def test_distributions_of_a_teacher_are_in_memory_where_they_are_made_and_compared(tmp_path: Path) -> None:
    """Of each response token log-probs and ids, 12 bytes a token of the vocabulary."""
    task = task_of(tmp_path, forward_rows=1, sends=False, updates=1, rows_per_update=1)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 2048}))
    some, whole = (rehearse(replace(task, compared_tokens=count, top_tokens=count)).works for count in (4, 0))
    column = 12 * 2048 * RESPONSE
    for kind in ("train", "forward"):
        assert whole[kind].peak[Kind.ACTIVATIONS] - some[kind].peak[Kind.ACTIVATIONS] >= 0.9 * column


def test_prompts_that_are_shared_are_computed_once(tmp_path: Path) -> None:
    task = task_of(tmp_path, forward_rows=0, sends=False, updates=1, group_size=ROWS)
    role = replace(task.role, training_args=TrainingArguments(per_device_train_batch_size=ROWS))
    alone = rehearse(replace(task, role=role)).works["train"].flops
    shared = rehearse(replace(task, role=replace(role, use_prefix_sharing=True))).works["train"].flops
    own = RESPONSE - 1  # the last token of a row predicts nothing
    pairs = ROWS * (PROMPT + own) ** 2 / 2 - PROMPT**2 / 2 - ROWS * own * (PROMPT + own / 2)
    attention = (4 + 10) * LAYERS * HIDDEN * pairs
    assert alone - shared == 3 * 2 * MATRICES * PROMPT * (ROWS - 1) + attention


@pytest.mark.parametrize("window", [None, 1, 3, 5, 40])
def test_pairs_of_a_kernel_are_those_in_its_window(window: int | None) -> None:
    """A token and itself are half a pair: the triangle is half a square."""
    lengths = ((7, 7), (2, 9), (5, 6), (1, 1))
    call = VarlenCall(lengths, *torch.zeros(2, 5, dtype=torch.int32))
    places = [place for queries, keys in lengths for place in range(keys - queries, keys)]
    assert pairs(call, window) == sum(place + 0.5 if window is None or place < window else window for place in places)


def test_sequences_that_ranks_share_are_exchanged(tmp_path: Path) -> None:
    task = task_of(tmp_path, forward_rows=0, sends=False, updates=1)
    args = replace(task.role.model_args, ulysses_size=2)
    one = rehearse(task).works["train"]
    two = rehearse(replace(task, dp_size=RANKS // 2, role=replace(task.role, model_args=args))).works["train"]
    assert two.peak[Kind.ACTIVATIONS] < 0.9 * one.peak[Kind.ACTIVATIONS]
    assert {c.ranks for c in two.collectives if c.name == "all_to_all"} == {(0, 1)}


MOE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_experts_of_several_ranks_compute_as_much_and_exchange_tokens(tmp_path: Path, dtype: str) -> None:
    task = task_of(tmp_path, forward_rows=0, sends=False, updates=1)
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    role = replace(task.role, model_args=replace(task.role.model_args, dtype=dtype))
    one = rehearse(replace(task, role=role))
    strategy = StrategyArguments("fsdp2_train", {"ep_size": 2})
    two = rehearse(replace(task, role=replace(role, strategy_args=strategy)))
    assert two.works["train"].flops == pytest.approx(one.works["train"].flops, rel=0.02)
    assert two.states[StateKind.MODEL_PARAMS] == pytest.approx(one.states[StateKind.MODEL_PARAMS], rel=0.1)
    sent = 2 * HIDDEN * (PROMPT + RESPONSE - 1) * (2 if dtype == "bf16" else 4)
    ((exchange, times),) = [one for one in two.works["train"].collectives.items() if one[0].name == "all_to_all"]
    # To the experts and back, in the forward and the backward pass of every layer and micro-batch.
    assert (len(exchange.ranks), exchange.num_bytes, times) == (2, sent, 4 * LAYERS * ROWS)


@pytest.mark.parametrize(
    ("recipe", "overrides", "phases"),
    [
        ("tiny/sft_config", [], ["update of sft_train"]),
        ("tiny_dpo/dpo_config", [], ["forward of reference", "update of actor_train"]),
        ("tiny_rm/rm_config", [], ["update of reward_train"]),
        ("tiny_distill/distill_config", ["logits_topk=0"], ["forward of teacher", "update of student"]),
        (
            "tiny_distill/opd_config",
            ["opd_form=topk"],
            ["weight update", "generation", "forward of teacher", "update of actor_train"],
        ),
        ("tiny_agentic/lake_config", [], ["weight update", "generation", "update of actor_train"]),
    ],
)
def test_other_pipelines(tiny: Any, recipe: str, overrides: list[str], phases: list[str]) -> None:
    loaded = load_config(None, recipe, None, overrides, check_files=False)
    report = rehearse_recipe(loaded, small_machine(16), tiny[1])
    assert report.fits and list(report.times) == phases
    assert all(flops > 0 for name, flops in report.flops.items() if name != "weight update")
    alone = sum(time.seconds for time in report.times.values())
    ahead = "distill_config" in recipe
    assert report.concurrent == (("forward of teacher",) if ahead else ())
    assert (report.seconds < alone) == ahead


AT_A_URL = "teacher.strategy_args={strategy_name: remote, strategy_config: {base_url: 'http://127.0.0.1:1/v1'}}"


@pytest.mark.parametrize(
    ("overrides", "phases"),
    [
        (["teacher.strategy_args={strategy_name: vllm}"], ["forward of teacher", "update of student"]),
        ([AT_A_URL, "~teacher.device_mapping"], ["update of student"]),
    ],
    ids=["an engine", "a URL"],
)
def test_teachers_that_are_no_plain_models(tiny: Any, overrides: list[str], phases: list[str]) -> None:
    loaded = load_config(None, "tiny_distill/distill_config", None, overrides, check_files=False)
    report = rehearse_recipe(loaded, small_machine(16), tiny[1])
    assert list(report.times) == phases
    held = [("teacher", "KV cache") in phase.parts for use in report.devices for phase in use.phases]
    assert any(held) == (len(phases) == 2)


def small_machine(gib: float) -> Hardware:
    return Hardware(Gpu("small", int(gib * 2**30), 1e12, 1e12, 1e11, 2**20, 1e10), "nvlink+ib400", 1e10, 1e9, 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Path]]:
    """The tiny recipe, its model's sizes from a file."""
    file = tmp_path_factory.mktemp("tiny") / "config.json"
    file.write_text(json.dumps(CONFIG))
    return load_config(None, "tiny/rlvr_config", None, (), check_files=False), {"": file}


@pytest.fixture(scope="module")
def rehearsed(tiny: tuple[Any, dict[str, Path]]) -> Rehearsal:
    return rehearse_recipe(tiny[0], small_machine(16), tiny[1])


def test_phases_of_a_step_and_who_is_on_the_devices(rehearsed: Rehearsal) -> None:
    assert rehearsed.fits
    names = [phase.name for phase in rehearsed.devices[0].phases]
    assert names[:2] == ["weight update", "generation"] and names[-1] == "update of actor_train"
    phases = {phase.name: phase.parts for use in rehearsed.devices for phase in use.phases}
    train = phases["update of actor_train"]
    assert train["actor_train", "optimizer states"] > 0
    assert ("actor_train", "optimizer states") not in phases["weight update"]
    content = json.loads(json.dumps(to_json(rehearsed)))
    assert content["fits"] and content["phases"].keys() == set(names)


def test_what_does_not_fit_is_refused_with_the_sum_and_changes_that_fit(tiny: Any, rehearsed: Rehearsal) -> None:
    loaded, given = tiny
    room = (rehearsed.peak - 2**20) / 2**30
    known: dict[Any, Any] = {}
    report = rehearse_recipe(loaded, small_machine(room), given, known=known)
    assert not report.fits
    (sentence,) = verdict(report)
    assert "does not fit on devices" in sentence and "more than the" in sentence
    eight_bits = ("++actor_train.training_args.optimizer=adamw_8bit",)
    assert eight_bits in candidates(loaded, report)
    muon = load_config(None, loaded.source, None, ["actor_train.training_args.optimizer=muon"], check_files=False)
    assert eight_bits not in candidates(muon, report), "another optimizer is no cure that was asked for"
    found = suggest(loaded, report, given, known=known)
    assert any("++actor_train.model_args.disable_gradient_checkpointing=false" in one.overrides for one in found)
    for one in found:
        changed = load_config(None, loaded.source, None, one.overrides, check_files=False)
        assert rehearse_recipe(changed, small_machine(room), given, known=known).fits


@pytest.mark.matrix
def test_a_recipe_that_cannot_fit_exits_with_1_and_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rehearse", "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_1gpu", "pretrain=Qwen/Qwen2.5-7B", "--no-suggestions"]
    assert main(words) == 1
    assert "does not fit on devices 0: in the phase update of actor_train" in capsys.readouterr().out.replace("\n", " ")


# Measured: seconds of an optimizer step, torch.cuda.max_memory_allocated in GiB (docs/benchmarks.md).
PACKED_SECONDS, PACKED_GIB = 2.218, 46.59


@pytest.mark.matrix
def test_a_step_that_was_measured_on_an_h100(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    role = {"model_args": {"dtype": "bf16", "disable_gradient_checkpointing": True}, "device_mapping": [0]}
    training = {"learning_rate": 1e-5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    settings = {
        "pipeline": "rlvr",
        "exp_name": "step",
        "pretrain": "Qwen/Qwen2.5-1.5B",
        "num_gpus_per_node": 1,
        "max_steps": 1,
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 8,
        "prompt_length": 1024,
        "response_length": 1024,
        "estimator": "grpo",
        "actor_train": role
        | {"training_args": training, "data_args": {"file_name": ["train.jsonl"]}}
        | {"strategy_args": {"strategy_name": "fsdp2_train"}},
        "actor_infer": role | {"strategy_args": {"strategy_name": "hf_infer"}},
        "rewards": {"gsm8k": {"worker_cls": "gsm8k_rule", "tag_included": ["gsm8k"], "world_size": 1}},
    }
    recipe.write_text(json.dumps(settings))
    words = ["--gpu", "h100-80g", "--json", "--no-suggestions", "actor_train.use_sequence_packing=true"]
    assert main(["rehearse", str(recipe), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    (update,) = (phase for phase in found["devices"][0]["phases"] if phase["name"] == "update of actor_train")
    allocated = sum(part["bytes"] for part in update["parts"] if part["kind"] != "context")
    assert allocated / 2**30 == pytest.approx(PACKED_GIB, rel=0.01)
    assert 0.4 * PACKED_SECONDS < found["phases"]["update of actor_train"]["seconds"] < PACKED_SECONDS


@pytest.fixture(scope="module")
def known() -> dict[Any, Any]:
    """Roles that recipes have in common."""
    return {}


@pytest.mark.default_rows("qwen2.5-7B-rlvr_megatron/rlvr_config")
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_for_real_models_need_what_the_page_says(recipe: str, known: dict[Any, Any]) -> None:
    row = recipe_row(recipe, known)
    assert row in PAGE.read_text(encoding="utf-8"), "python -m benchmarks.rehearsal --recipes --write"


def test_all_recipes_for_real_models_are_on_the_page() -> None:
    examples = PAGE.parents[1] / "examples"
    files = [file for pattern in ("qwen*", "gsm8k", "agentic_demo") for file in examples.glob(f"{pattern}/*.yaml")]
    assert {str(file.relative_to(examples).with_suffix("")) for file in files} == set(RECIPES)
    rows = PAGE.read_text(encoding="utf-8").partition("<!-- recipes -->")[2].partition("<!-- end of recipes -->")[0]
    assert [line.split("`")[1] for line in rows.splitlines() if "`" in line] == list(RECIPES)


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed ZeRO-2", "megatron TP2"])
def test_peaks_are_what_was_predicted(strategy: str) -> None:
    """Two ranks on this CPU: resident memory of a model of 10M weights, within the tenth that the page speaks of."""
    command = [sys.executable, "-m", "benchmarks.rehearsal", "--models", "10M", "--only", strategy]
    found = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True, check=True).stdout
    cells = [cell.strip() for cell in found.splitlines()[-1].strip("|").split("|")]
    assert cells[:3] == ["10M", strategy, "2"], found
    measured, predicted = (float(cell.replace(",", "")) for cell in cells[4:6])
    assert predicted == pytest.approx(measured, rel=0.1), found
