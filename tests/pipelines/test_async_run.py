"""Runs whose engines generate while training goes on."""

from __future__ import annotations

from typing import Any

import pytest

from roll.checkpoint.state import load_state
from tests.pipelines.conftest import Run
from tests.support.tiny_runs import HERE, FinishedRun, TinyWorld, untimed

pytestmark = pytest.mark.e2e

STEPS, PROMPTS = 4, 4
AHEAD = {"async_generation_ratio": 1.0, "max_steps": STEPS, "save_steps": 2, "eval_steps": 3}


def changes(world: TinyWorld) -> dict[str, Any]:
    validation = {"data_args": {"file_name": [str(world.validation)], "messages": "messages"}, "greedy": False}
    return AHEAD | {"validation": validation}


@pytest.fixture(scope="module")
def ahead(run: Run, world: TinyWorld) -> FinishedRun:
    return run(changes(world))


def prompts(finished: FinishedRun) -> list[set[str]]:
    """Which prompts each step trained on."""
    return [{sample["prompt_id"] for sample in finished.samples(row["step"])} for row in finished.steps]


def test_every_prompt_is_trained_on_once_and_none_too_late(ahead: FinishedRun) -> None:
    trained = prompts(ahead)
    assert [len(step) for step in trained] == [PROMPTS] * STEPS
    assert len(set.union(*trained)) == PROMPTS * STEPS
    assert sum(ahead.values("scheduler/collect_query_count")) == PROMPTS * STEPS, "the last step runs ahead of nothing"
    assert ahead.values("scheduler/collect_query_count")[0] == 2 * PROMPTS
    assert all(ahead.values(f"scheduler/{name}_query_count")[-1] == 0 for name in ("generating", "waiting"))
    assert sum(ahead.values("scheduler/stale_query_count")) == 0
    assert ahead.values("scheduler/version_lag/max") == [0, 1, 1, 1]


def test_ratios_are_taken_against_the_engine_that_sampled(ahead: FinishedRun) -> None:
    on_policy, stale = ahead.values("actor/ratio_max")[0], ahead.values("actor/ratio_max")[1:]
    assert on_policy == pytest.approx(1, abs=1e-4)
    assert min(stale) > 1.001, "samples of older weights"
    differences = ahead.values("actor/train_infer_log_diff_abs_mean")
    assert 0 < differences[0] < 1e-5 < 1e-4 < min(differences[1:]), "the gauge is not that of the engine with itself"


@pytest.mark.long
def test_an_interrupted_run_goes_on_with_what_was_under_way(ahead: FinishedRun, run: Run, world: TinyWorld) -> None:
    checkpoint = ahead.output / "checkpoints" / "checkpoint-2"
    state = load_state(checkpoint / "pipeline")["rollout"]
    unfinished, complete = (state["ahead"][name] for name in ("unfinished", "complete"))
    held = [one["item"] | {"order": one["order"]} for one in unfinished] + complete
    assert state["ahead"]["ledger"] == {"drawn": 3 * PROMPTS, "trained": 2 * PROMPTS, "filtered": 0, "stale": 0}
    assert state["num_drawn"] == 3 * PROMPTS
    assert len({one["order"] for one in held}) == PROMPTS

    resumed = run(changes(world) | {"resume_from_checkpoint": str(checkpoint)})
    assert [row["step"] for row in resumed.steps] == [2, 3]
    before, after = prompts(ahead), prompts(resumed)
    assert set.union(*before[:2], *after) == set.union(*before), "nothing is lost, nothing asked twice"
    assert {one["prompt_id"] for one in held} <= set.union(*after)


@pytest.mark.long
def test_without_room_ahead_the_numbers_are_those_of_a_synchronous_run(run: Run, plain_run: FinishedRun) -> None:
    """A tenth of a step is less than a prompt. A loop that does what is done without one changes nothing, either."""
    ahead = {"async_generation_ratio": 0.1, "user_defined_rollout_loop_cls": f"{HERE}.rollout_loops.PlainLoop"}
    expected = plain_run.steps[-1]
    ours = untimed(run(ahead | {"max_steps": 2, "enable_old_logprobs_recompute": True}).steps[-1])
    assert ours.pop("scheduler/stale_query_count") == ours.pop("scheduler/version_lag/max") == 0
    assert {name: value for name, value in ours.items() if name in expected} == {
        name: value for name, value in untimed(expected).items() if name != "scheduler/aborted_query_count"
    }


@pytest.mark.long
def test_two_rounds_are_trained_on_what_the_engine_saw(run: Run, plain_run: FinishedRun) -> None:
    """The engine's log-probs of the last round are the trainer's: after another context they would be off by tenths."""
    rounds = {"max_steps": 2, "user_defined_rollout_loop_cls": f"{HERE}.rollout_loops.CheckTwice"}
    finished = run(rounds)
    assert max(finished.values("actor/train_infer_log_diff_abs_mean")) < 1e-5
    once, twice = (one.steps[0]["token/prompt_length/mean"] for one in (plain_run, finished))
    assert twice - once > 3.0, "the first answer, and the tokens that the loop put there"


@pytest.mark.matrix
def test_roles_on_one_device_take_turns(run: Run) -> None:
    """Samples that are unfinished when a step has its own are carried past the training."""
    turns = {
        "async_generation_ratio": 1.0,
        "max_steps": 3,
        "num_gpus_per_node": 1,
        "is_offload_states": True,
        "actor_infer.device_mapping": [0],
        "actor_infer.strategy_args.strategy_config": {"max_num_seqs": 4},
    }
    finished = run(turns)
    trained = prompts(finished)
    assert [len(step) for step in trained] == [PROMPTS] * 3
    assert len(set.union(*trained)) == 3 * PROMPTS
    assert finished.values("scheduler/collect_query_count") == [2 * PROMPTS, PROMPTS, 0]
    assert max(finished.values("scheduler/version_lag/max")) <= 1
    assert all(finished.values("time/actor_infer/offload/total")), "it leaves the device in every step"
