"""Actor and critic of the six files in ``examples/deepspeed`` learn, step by step, what they learn under FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")


from roll.config.loader import load_config
from roll.config.roles import WorkerConfig
from tests.strategies import jobs
from tests.strategies.comparison import RELATIVE, assert_same_gradients
from tests.strategies.samples import make_batch, split_rows

EXAMPLES = Path(__file__).parents[3] / "examples/deepspeed"
CASES = sorted(file.stem for file in EXAMPLES.glob("zero*.yaml"))
STEPS = 2
PARTS = split_rows(make_batch(), (7, 5))

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


@pytest.fixture(scope="module")
def under_fsdp2(run_ranks, tied_model):
    """``under_fsdp2(role)``: what it learns by the switch of one key."""
    found = {}

    def learn(name):
        if name not in found:
            switched = role_of("zero2_no_offload", name, tied_model, f"{name}.strategy_args.strategy_name=fsdp2_train")
            found[name] = run_ranks(2, jobs.train, switched, PARTS, STEPS, None, name == "critic")[0]
        return found[name]

    return learn


@pytest.mark.long
@pytest.mark.default_rows("actor_train-zero3_cpu_offload", "critic-zero2_no_offload")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["actor_train", "critic"])
def test_a_case_learns_what_fsdp2_learns(run_ranks, tied_model, under_fsdp2, name, case):
    result = run_ranks(2, jobs.train, role_of(case, name, tied_model), PARTS, STEPS, None, name == "critic")[0]
    wanted = under_fsdp2(name)
    assert_same_gradients(result["gradients"], wanted["gradients"])
    for key in wanted["gradients"]:
        torch.testing.assert_close(result["weights"][key], wanted["weights"][key], rtol=0, atol=2e-6)
    for key, values in wanted["outputs"].items():
        torch.testing.assert_close(result["outputs"][key], values, rtol=0, atol=1e-5)
        assert values.any()
    for key in ("grad_norm", "lr"):
        assert wanted["metrics"][key] and result["metrics"][key] == pytest.approx(wanted["metrics"][key], rel=RELATIVE)
    offloads = case.endswith("cpu_offload") and case[4] != "1"
    assert result["zero"][:3] == (int(case[4]), offloads, offloads and case[4] == "3"), "the name says what it is"
