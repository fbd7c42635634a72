"""DPO runs against a plain loop, in every layout, and continued from a checkpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.algorithms.preferences import PairSums, preference_loss
from roll.config.losses import PreferenceLossConfig
from roll.distributed import Interrupted
from roll.methods.preferences import DPO
from tests.pipelines.conftest import Run
from tests.support.tiny_runs import (
    FinishedRun,
    TinyWorld,
    drawn_pairs,
    learned,
    supervised_layout,
    supervised_layouts,
    training_args,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BETA, LEARNING_RATE, STEPS, PAIRS = 0.1, 1e-4, 3, 8
NUMBERS = (
    "actor/loss",
    "actor/acc",
    "actor/margin",
    "actor/chosen_log_prob",
    "actor/reject_log_prob",
    "actor/grad_norm",
)


def plain_dpo(world: TinyWorld, pair_ids: list[list[str]], options: PreferenceLossConfig) -> list[dict[str, float]]:
    """One row at a time, no padding, no sharing: the metrics of each step on the named pairs."""
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    policy, reference = (AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    pairs = {pair["id"]: pair for pair in map(json.loads, world.preferences.read_text().splitlines())}

    def total(model: Any, question: str, answer: str) -> tuple[torch.Tensor, int]:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        response = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt + response])
        log_probs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        taken = log_probs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        return taken.sum(), len(response)

    found = []
    for step_ids in pair_ids:
        sums: dict[str, list[Any]] = {"policy": [], "reference": [], "lengths": []}
        for name in step_ids:
            sides = [(pairs[name]["instruction"], pairs[name][side]) for side in ("chosen", "rejected")]
            own = [total(policy, *side) for side in sides]
            with torch.no_grad():
                sums["reference"].append(torch.stack([total(reference, *side)[0] for side in sides]))
            sums["policy"].append(torch.stack([value for value, _ in own]))
            sums["lengths"].append(torch.tensor([float(count) for _, count in own]))
        stacked = PairSums(**{key: torch.stack(values) for key, values in sums.items()})
        loss = preference_loss(stacked, options).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            ratio = options.beta * (stacked.policy - stacked.reference)
            margin = ratio[:, 0] - ratio[:, 1]
            found.append(
                {
                    "actor/loss": float(loss),
                    "actor/acc": float((margin > 0).float().mean()),
                    "actor/margin": float(margin.mean()),
                    "actor/chosen_log_prob": float(stacked.policy[:, 0].mean()),
                    "actor/reject_log_prob": float(stacked.policy[:, 1].mean()),
                    "actor/grad_norm": float(norm),
                }
            )
    return found


@pytest.fixture(scope="module")
def whole(run: Run) -> FinishedRun:
    return run({}, pipeline="dpo")


def assert_same(run: FinishedRun, wanted: list[dict[str, float]], rel: float = 2e-4) -> None:
    for row, numbers in zip(run.steps, wanted, strict=True):
        for name in NUMBERS:
            if name == "actor/acc" and row["step"] == 0:
                continue  # before the first update all leads are 0, but for rounding
            assert row[name] == pytest.approx(numbers[name], rel=rel, abs=2e-5), (row["step"], name)


def test_a_run_is_a_plain_loop(whole: FinishedRun, world: TinyWorld) -> None:
    wanted = plain_dpo(world, drawn_pairs("preferences", STEPS, PAIRS), PreferenceLossConfig(beta=BETA))
    assert wanted[0]["actor/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert wanted[2]["actor/loss"] < 0.65, "three steps must change something"
    assert_same(whole, wanted)


LAYOUTS = supervised_layouts("actor_train") | {
    "Megatron, two tensor ranks": supervised_layout(
        "actor_train", "megatron_train", {"tensor_model_parallel_size": 2}, 2, 4
    )
}


@pytest.mark.default_rows("Megatron, two tensor ranks")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_numbers(run: Run, whole: FinishedRun, name: str) -> None:
    assert_same(run(LAYOUTS[name], pipeline="dpo"), whole.steps)


@pytest.mark.matrix
def test_a_loss_over_all_pairs_does_not_depend_on_the_split(run: Run, world: TinyWorld) -> None:
    changes = {"loss_type": "aot", "max_steps": 2}
    done = run(changes | supervised_layout("actor_train", "fsdp2_train", {}, 1, 4), pipeline="dpo")
    wanted = plain_dpo(world, drawn_pairs("preferences", 2, PAIRS), PreferenceLossConfig(beta=BETA, loss_type="aot"))
    assert_same(done, wanted)


def test_the_base_of_an_adapter_is_the_reference(run: Run) -> None:
    adapter = {
        "model_args.lora_target": "all-linear",
        "model_args.lora_rank": 4,
        "training_args": training_args(4, 2, 1e-2),
    }
    keys = {f"actor_train.{key}": value for key, value in adapter.items()}
    done = run({**keys, "reference": None}, pipeline="dpo")
    assert done.steps[0]["actor/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert done.steps[2]["actor/margin"] > 0
    assert not (done.output / "logs" / "workers" / "reference-0.log").exists(), "no second model"


def test_a_signal_during_an_evaluation_loses_no_step(
    run: Run, world: TinyWorld, whole: FinishedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    held_out = {"eval_steps": 2, "validation": {"data_args": {"file_name": str(world.preferences)}}}
    held_out |= {"save_steps": 3, "is_offload_states": True}
    monkeypatch.setattr(DPO, "measure", interrupted)
    with pytest.raises(Interrupted):
        run(held_out, "dpo", tmp_path)
    monkeypatch.undo()
    checkpoint = tmp_path / "checkpoints" / "checkpoint-2"
    resumed = run(held_out | {"resume_from_checkpoint": str(checkpoint)}, "dpo")
    assert [learned(row) for row in resumed.steps] == [learned(whole.steps[2])]
    first, last = resumed.with_metric("val/acc")
    assert (first["step"], last["step"]) == (2, 3), "the evaluation that the signal ended comes first"
    assert last["val/acc"] > 0.5 and last["val/loss"] < first["val/loss"] < 0.69
    shared = [path for path in resumed.logs.rglob("*") if path.stat().st_mode & 0o077]
    assert not shared, "nothing of a run is anybody else's to read"


@pytest.mark.matrix
def test_kto_does_not_depend_on_the_layout(run: Run, world: TinyWorld) -> None:
    """``tests/algorithms/test_preferences.py`` has its formula as a plain loop."""
    rows = []
    for index, pair in enumerate(map(json.loads, world.preferences.read_text().splitlines())):
        side = ("chosen", "rejected")[index % 2]
        rows.append({"prompt": pair["instruction"], "completion": pair[side], "label": side == "chosen"})
    file = world.folder / "labelled.jsonl"
    file.write_text("".join(json.dumps({"id": f"pair-{index}", **row}) + "\n" for index, row in enumerate(rows)))
    changes = {
        "loss_type": "kto",
        "undesirable_weight": 0.5,
        "actor_train.data_args": {"file_name": str(file)},
        "eval_steps": 3,
        "validation": {"data_args": {"file_name": str(file)}},
    }
    one, two = (run(changes | layout, pipeline="dpo") for layout in ({}, LAYOUTS["packed to equal work"]))
    for name in ("actor/loss", "actor/kl_estimate", "actor/chosen_reward", "actor/grad_norm"):
        assert two.values(name) == pytest.approx(one.values(name), rel=5e-4, abs=2e-5), name
    assert max(one.values("actor/kl_estimate")) > 0, "the estimate takes part"
    (validation,) = one.with_metric("val/acc")
    assert validation["val/acc"] > 0.5
