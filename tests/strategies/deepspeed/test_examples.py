"""Actor and critic of the six files in ``examples/deepspeed`` learn, step by step, what they learn under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")


from roll.config.loader import load_config
from roll.config.roles import WorkerConfig
from tests.strategies import sharded_cases
from tests.strategies.comparison import RELATIVE
from tests.strategies.deepspeed import cases
from tests.strategies.deepspeed.test_numbers import SPLIT
from tests.strategies.samples import make_batch, split_rows

EXAMPLES = Path(__file__).parents[3] / "examples/deepspeed"
CASES = sorted(file.stem for file in EXAMPLES.glob("zero*.yaml"))
STEPS = 2
RunRanks = Callable[..., list[Any]]
Results = dict[str, dict[str, Any]]

# The files' own options but for the batch, so that there are micro-batches, and AdamW's epsilon: 1e-8 would move an
# element whose gradient is rounding noise as far as any other, in either direction.
SETTINGS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 32, "adam_epsilon": 1e-3}


def role_of(case: str, name: str, model: Path, *overrides: str) -> WorkerConfig:
    settings = [
        f"{role}.training_args.{key}={value}" for role in ("actor_train", "critic") for key, value in SETTINGS.items()
    ]
    file = EXAMPLES / f"{case}.yaml"
    loaded = load_config(None, file, overrides=[f"pretrain={model}", *settings, *overrides], check_files=False)
    return loaded.plan.roles[name].section


@pytest.fixture(scope="module", params=["actor_train", "critic"])
def learned(request: pytest.FixtureRequest, run_ranks: RunRanks, tied_model: Path) -> tuple[Results, dict[str, Any]]:
    """Of one role: what it learned in each case, and under FSDP2 by the switch of one key."""
    name, parts = request.param, split_rows(make_batch(), SPLIT)
    is_critic = name == "critic"
    roles = {case: role_of(case, name, tied_model) for case in CASES}
    results = run_ranks(2, cases.train_each, roles, parts, STEPS, is_critic)[0]
    switched = role_of("zero2_no_offload", name, tied_model, f"{name}.strategy_args.strategy_name=fsdp2_train")
    return results, run_ranks(2, sharded_cases.train, switched, parts, STEPS, None, is_critic)[0]


@pytest.mark.default_rows("actor_train-zero3_cpu_offload", "critic-zero2_no_offload")
@pytest.mark.parametrize("case", CASES)
def test_a_case_learns_what_fsdp2_learns(learned: tuple[Results, dict[str, Any]], case: str) -> None:
    result, wanted = learned[0][case], learned[1]
    assert result["gradients"].keys() == wanted["gradients"].keys()
    for name, gradient in wanted["gradients"].items():
        tolerance = RELATIVE * float(gradient.abs().max()) + 1e-9
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=0, atol=tolerance)
        torch.testing.assert_close(result["weights"][name], wanted["weights"][name], rtol=0, atol=2e-6)
    for name, values in wanted["outputs"].items():
        torch.testing.assert_close(result["outputs"][name], values, rtol=0, atol=1e-5)
        assert values.any()
    for name in ("grad_norm", "lr"):
        assert (
            result["metrics"][name] == pytest.approx(wanted["metrics"][name], rel=RELATIVE) and wanted["metrics"][name]
        )


def test_the_files_say_what_their_names_say(learned: tuple[Results, dict[str, Any]]) -> None:
    for case, result in learned[0].items():
        stage = int(case[4])
        assert result["plan"].stage == stage
        offloads = case.endswith("cpu_offload") and stage > 1
        assert result["offloads"] == (offloads, offloads and stage == 3), case
