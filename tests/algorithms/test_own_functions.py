"""Functions by name, and a user's own function of each kind by its dotted path."""

from __future__ import annotations

import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from roll.algorithms import aggregation
from roll.algorithms.advantages import AdvantageInputs, estimate_advantages, register_advantage
from roll.algorithms.aggregation import LossDenominators, group_tokens_of, row_weights, weighted_sum
from roll.algorithms.kl import KLOptions, kl_estimate
from roll.algorithms.losses import actor_loss, register_policy_loss
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.registry import Registry
from roll.algorithms.samples import resolve_norm_types
from roll.config.reading.fields import Choice
from roll.protocol.metrics import to_floats
from tests.algorithms.reference import inputs_of, make_batch, whole
from tests.support.keys import algorithm, loss_options


def test_names_aliases_and_dotted_paths() -> None:
    registry: Registry = Registry("thing")
    registry.add(math.sin, "sine", ("sin",))
    assert registry.names == ("sine",)
    assert registry.resolve("sin") is math.sin
    assert registry.resolve("math.cos") is math.cos
    assert registry.resolve("os.path:join")("a", "b") == "a/b"
    registry.add(math.sin, "sine")
    with pytest.raises(ValueError, match="registered already"):
        registry.add(math.cos, "sine")


@pytest.mark.parametrize(
    ("name", "message"),
    [("sinn", "nearest known: 'sine'"), ("no_such.module", "no_such"), ("math.no", "math"), ("math.pi", "float")],
)
def test_mistakes_are_named(name: str, message: str) -> None:
    registry: Registry = Registry("thing")
    registry.add(math.sin, "sine")
    with pytest.raises(ValueError, match=message):
        registry.resolve(name)


OWN = "tests.own_algorithms"


def test_policy_loss_with_an_option_of_its_own() -> None:
    batch = make_batch(20, 6, 9)
    for gate in (1.5, 0.7):
        settings = {"pg_variant": f"{OWN}.gated", "pg_variant_args": {} if gate == 1.5 else {"gate": gate}}
        inputs = replace(inputs_of(batch), sample_weights=None)
        metrics = to_floats(actor_loss(inputs, loss_options(settings), whole(batch)).metrics)
        kept = ((batch.log_probs - batch.old_log_probs).exp() < gate) & batch.mask
        assert metrics["actor/gated"] == pytest.approx(float(kept.sum() / batch.mask.sum()))
        per_token = -batch.advantages * batch.log_probs * kept
        lengths = batch.mask.sum(-1).clamp(min=1)
        expected = (per_token.sum(-1) / lengths).sum() / whole(batch).samples
        assert metrics["actor/pg_loss"] == pytest.approx(float(expected))
    with pytest.raises(ValueError, match=r"loss\.gaet = 1: unknown key; the nearest known one is gate"):
        loss_options({"pg_variant": f"{OWN}.gated", "pg_variant_args": {"gaet": 1}})


def test_advantage_estimator_with_an_option_of_its_own() -> None:
    batch = make_batch(21, 6, 9)
    options = algorithm(estimator={"name": f"{OWN}.above_a_bar", "bar": 0.25})
    outputs = estimate_advantages(AdvantageInputs(batch.rewards, batch.mask, batch.group_ids), options)
    totals = batch.rewards.sum(-1, keepdim=True).expand_as(batch.mask)
    assert_close(outputs.advantages, torch.where(batch.mask, totals - 0.25, 0.0).float())


@pytest.mark.usefixtures("own_registrations")
def test_what_a_decorator_registers_has_a_name() -> None:
    from tests import own_algorithms

    batch = make_batch(21, 6, 9)
    inputs, options = AdvantageInputs(batch.rewards, batch.mask, batch.group_ids), own_algorithms.BarOptions()
    register_advantage("by_name", norm=("batch", None))(lambda inputs, _: own_algorithms.above_a_bar(inputs, options))
    assert resolve_norm_types(Choice("by_name")) == ("batch", None)
    by_name, by_path = (
        estimate_advantages(inputs, algorithm(adv_estimator=name)) for name in ("by_name", f"{OWN}:above_a_bar")
    )
    assert torch.equal(by_name.advantages, by_path.advantages)
    register_policy_loss("gated_by_name", options=own_algorithms.GatedOptions)(own_algorithms.gated)
    losses = [
        actor_loss(inputs_of(batch), loss_options({"pg_variant": name}), whole(batch)).loss
        for name in ("gated_by_name", f"{OWN}.gated")
    ]
    assert torch.equal(*losses)


def test_aggregation_that_asks_for_groups() -> None:
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    groups, loss = torch.tensor([1, 0, 1]), torch.tensor([[1.0, 2.0], [3.0, 9.0], [4.0, 5.0]])
    denominators = LossDenominators(5.0, 3.0, group_tokens=group_tokens_of(mask, groups, 2))
    result = weighted_sum(loss, mask, row_weights(mask, f"{OWN}.share_of_the_prompt", denominators, groups))
    assert_close(result, torch.tensor(3.0 * 2 / 4 + 3.0 * 1 / 1 + 9.0 * 2 / 4))
    without = weighted_sum(loss, mask, row_weights(mask, f"{OWN}.row_sum", denominators))
    assert_close(without, torch.tensor(15.0 / 3))


def test_kl_estimator_in_loss_and_reward() -> None:
    batch = make_batch(22, 6, 9)
    expected = (batch.log_probs - batch.ref_log_probs).square()
    assert_close(kl_estimate(batch.log_probs, batch.ref_log_probs, KLOptions(f"{OWN}.squared")), expected)
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": f"{OWN}.squared"}
    metrics = to_floats(actor_loss(inputs_of(batch), loss_options(settings), whole(batch)).metrics)
    rows = expected.sum(-1) / batch.mask.sum(-1).clamp(min=1)
    assert metrics["actor/kl_loss"] == pytest.approx(float(rows.sum() / whole(batch).samples))


def test_correction() -> None:
    batch = make_batch(24, 6, 9)
    batch.rollout_log_probs[batch.mask] = torch.where(torch.rand(int(batch.mask.sum())) < 0.5, -3.0, -1.0).double()
    settings = {"train_infer_correction": f"{OWN}.halved_where_unlikely", "pg_variant": "vanilla"}
    inputs = replace(inputs_of(batch), sample_weights=None)
    metrics = to_floats(actor_loss(inputs, loss_options(settings), whole(batch)).metrics)
    per_token = -batch.advantages * batch.log_probs * torch.where(batch.rollout_log_probs < -2, 0.5, 1.0)
    rows = torch.where(batch.mask, per_token, 0.0).sum(-1) / batch.mask.sum(-1).clamp(min=1)
    assert metrics["actor/weighted_pg_loss"] == pytest.approx(float(rows.sum() / whole(batch).samples))
    assert 0 < metrics["actor/unlikely"] < 1


@pytest.mark.usefixtures("own_registrations")
def test_the_functions_of_the_documentation_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")
    source = tmp_path / "own.py"
    source.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    own = SimpleNamespace(**runpy.run_path(str(source)))
    batch = make_batch(26, 6, 9)
    kl = own.jeffreys(batch.log_probs, batch.ref_log_probs, KLOptions())
    assert bool((kl >= 0).all())
    weights = own.square_root_length(batch.mask, LossDenominators(1.0, 2.0))
    assert_close(weights[0], 1 / (batch.mask[0].sum().double().sqrt() * 2))
    correction = own.drop_surprises(inputs_of(batch), MetricBuilder())
    assert correction.weights.shape == correction.keep.shape == batch.mask.shape
    metrics = MetricBuilder()
    assert own.my_loss(inputs_of(batch), own.MyOptions(), metrics).shape == batch.mask.shape
    advantages = AdvantageInputs(batch.rewards, batch.mask, batch.group_ids)
    assert own.leave_best_out(advantages, algorithm())[0].shape == batch.mask.shape
    assert own.graded("is 7", "7")["right"] == 1.0


ROW = '    PolicyLoss("ppo", options=PpoOptions),\n'
OPTIONS = "@dataclass(frozen=True)\nclass PolicyLoss(Named):\n"
TOY_OPTIONS = """@dataclass(frozen=True)
class ToyOptions:
    strength: float = setting(1.0, gt=0)


"""
TOY = """
from roll.config.choices import ToyOptions


@register_policy_loss("toy", options=ToyOptions)
def toy(inputs: LossInputs, options: ToyOptions, metrics: MetricBuilder) -> Tensor:
    metrics.mean("actor/toy", options.strength, 1.0)
    return -options.strength * inputs.advantages * inputs.log_probs
"""
PROGRAM = """
import sys, torch
from roll.algorithms.aggregation import LossDenominators
from roll.algorithms.policy_losses import LossInputs
from roll.algorithms.losses import actor_loss, actor_loss_options
from roll.config.loader import load_config

config = load_config(None, sys.argv[1], overrides=sys.argv[2:], check_files=False).config
ones = torch.ones(1, 2)
options = actor_loss_options(config)
result = actor_loss(LossInputs(-ones, ones, ones.bool()), options, LossDenominators(2, 1))
print(float(result.loss), result.metrics["actor/toy"].value())
"""


@pytest.mark.long
def test_a_new_policy_loss_of_the_package_touches_two_files(tmp_path: Path) -> None:
    """A row with its options in the configuration, and a function: the file is checked, and the loss is computed."""
    package = Path(aggregation.__file__).parents[1]
    shutil.copytree(package, tmp_path / "roll", ignore=shutil.ignore_patterns("__pycache__"))
    table, functions = tmp_path / "roll/config/choices.py", tmp_path / "roll/algorithms/policy_losses.py"
    text = table.read_text(encoding="utf-8")
    assert text.count(ROW) == text.count(OPTIONS) == 1
    text = text.replace(OPTIONS, TOY_OPTIONS + OPTIONS)
    table.write_text(text.replace(ROW, f'{ROW}    PolicyLoss("toy", options=ToyOptions),\n'), encoding="utf-8")
    functions.write_text(functions.read_text(encoding="utf-8") + TOY, encoding="utf-8")

    def run(*changes: str) -> subprocess.CompletedProcess[str]:
        recipe = str(package.parent / "examples/tiny/rlvr_config.yaml")
        command = [sys.executable, "-c", PROGRAM, recipe, *changes]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    fine = run("pg_variant=toy", "toy_strength=3", "use_kl_loss=false")
    assert fine.stdout.split() == ["3.0", "3.0"], fine.stderr
    assert run("loss={name: toy, strength: 3}", "use_kl_loss=false").stdout == fine.stdout
    assert "loss.strength" in run("loss={name: toy, strength: 0}").stderr
    assert "toy_strength" in run("pg_variant=toy", "toy_strength=0").stderr
