"""Clients on real workers: the two halves of a step, checkpoints, futures in both worlds, roles that take turns."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import roll
from roll.config.losses import PreferenceLossConfig
from roll.methods.preferences import DPO, PairLoss, pair_batch
from roll.protocol import DataProto
from roll.strategies.engines.requests import SamplingParams
from tests.config.good import GONE, changed
from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.support.tiny_runs import TinyWorld, dpo_settings, let_go_of_process, make_world, rlvr_settings

ROOT = Path(__file__).parents[2]
Settings = Callable[[TinyWorld, Path], dict[str, Any]]
LOSS = PairLoss(options=PreferenceLossConfig(loss_type="sigmoid", beta=0.5))


@pytest.fixture(scope="module")
def world(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:  # noqa: F811
    return make_world(tiny, tmp_path_factory.mktemp("world"))


@pytest.fixture
def workers(
    world: TinyWorld, tmp_path: Path, shared_ray: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., roll.Workers]]:
    """``workers(dpo_settings, {"dotted.key": value})``: not started yet."""
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)

    def made(settings: Settings, changes: Mapping[str, Any]) -> roll.Workers:
        return roll.Workers(changed(changes, settings(world, tmp_path / "run")))

    yield made
    let_go_of_process()


def pairs(workers: roll.Workers) -> DataProto:
    rows = DPO.read(workers.config, workers.plan, workers.plan.data_args, workers.tokenizer)
    return pair_batch([rows[index] for index in range(8)], workers.pad_token_id)


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.default_rows("fsdp2_train")
@pytest.mark.parametrize("strategy", ["fsdp2_train", "fsdp_train"])
def test_the_halves_of_a_step_are_the_step(strategy: str, workers: Callable[..., roll.Workers], tmp_path: Path) -> None:
    """To the last bit, from the same checkpoint, on two ranks; and gradients add up until the optimizer steps. Both
    roles leave the devices that they share in turn."""
    changes = {
        "actor_train.strategy_args.strategy_name": strategy,
        "actor_train.device_mapping": [0, 1],
        "reference.device_mapping": [0, 1],
        "is_offload_states": True,
    }
    with workers(dpo_settings, changes) as started:
        policy, reference = roll.TrainClient(started), roll.TrainClient(started, "reference")
        batch = pairs(started)
        batch.batch["ref_log_probs"] = reference.forward(batch).result()["log_probs"]
        policy.save(tmp_path / "begun").result()
        whole = policy.step(batch, LOSS).result()
        after = policy.forward(batch).result()["log_probs"]

        policy.load(tmp_path / "begun").result()
        first = policy.forward_backward(batch, LOSS)
        between = reference.forward(batch)
        second = policy.optim_step()
        assert {**first.result(), **second.result()} == whole
        assert torch.equal(policy.forward(batch).result()["log_probs"], after)
        assert torch.equal(between.result()["log_probs"], batch.batch["ref_log_probs"])

        policy.load(tmp_path / "begun").result()
        added = [policy.forward_backward(batch, LOSS) for _ in range(2)]
        assert policy.optim_step().result()["actor/grad_norm"] == 2 * whole["actor/grad_norm"]
        assert added[0].result() == added[1].result()


@pytest.mark.long
@pytest.mark.e2e
def test_a_strategy_that_does_both_at_once_says_so(workers: Callable[..., roll.Workers]) -> None:
    with workers(dpo_settings, {"actor_train.strategy_args.strategy_name": "deepspeed_train"}) as started:
        policy, batch = roll.TrainClient(started), pairs(started)
        with pytest.raises(
            ValueError, match=r"actor_train.*deepspeed_train computes .* call step, or use one of fsdp2"
        ):
            policy.forward_backward(batch, LOSS)
        with pytest.raises(ValueError, match="'reference' does not learn; in this configuration actor_train does"):
            roll.TrainClient(started, "reference").step(batch, LOSS)
        with pytest.raises(ValueError, match=r"role 'critic' must be one that computes .*: actor_train, reference"):
            roll.TrainClient(started, "critic")


@pytest.mark.e2e
def test_samples_come_from_the_weights_that_were_sent(workers: Callable[..., roll.Workers], world: TinyWorld) -> None:
    """Engines and trainer share a device. Calls that nobody has waited for are done in their order, and awaited in a
    coroutine."""
    changes = {"actor_infer.device_mapping": [0], "is_offload_states": True}
    params = SamplingParams(max_new_tokens=6, seed=3)

    async def loop(started: roll.Workers) -> None:
        policy, engine = roll.TrainClient(started), roll.EngineClient(started)
        prompts = [started.tokenizer.encode(text) for text in ("How many?", "Five and 2")]
        before = engine.sample(prompts, params, num_samples=3)
        sent = policy.send_weights(engine)
        groups = await engine.sample(prompts, params, num_samples=3)
        assert before.done()
        assert sent.done()
        assert [group.token_ids.tolist() for group in groups] == [g.token_ids.tolist() for g in await before]
        versions = {span[0] for group in groups for spans in group.weight_versions for span in spans}
        assert versions == {0}
        rows = [[*prompts[0], *tokens] for tokens in groups[0].split(groups[0].token_ids)]
        longest = max(map(len, rows))
        mask = torch.tensor([[len(prompts[0]) <= i < len(row) for i in range(longest)] for row in rows])
        batch = DataProto.from_dict(
            {
                "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
                "attention_mask": torch.tensor([[i < len(row) for i in range(longest)] for row in rows]),
                "response_mask": mask,
            }
        )
        computed = (await policy.forward(batch))["log_probs"][mask]
        assert torch.allclose(computed, torch.tensor(groups[0].log_probs), atol=1e-4)
        with pytest.raises(ValueError, match="prompt 1: no token"):
            engine.sample([prompts[0], []], params)
        with pytest.raises(ValueError, match=r"prompt 0: top_p is 2\.0, must be in"):
            engine.sample(prompts, SamplingParams(4, top_p=2.0))

    with workers(rlvr_settings, changes) as started:
        asyncio.run(loop(started))


@pytest.mark.long
@pytest.mark.e2e
def test_an_error_of_the_loop_ends_the_workers(workers: Callable[..., roll.Workers]) -> None:
    with pytest.raises(ZeroDivisionError) as caught, workers(rlvr_settings, {}) as started:
        roll.EngineClient(started).sample([[5, 6]] * 50, SamplingParams(max_new_tokens=100), num_samples=8)
        1 / 0  # noqa: B018
    assert "the workers of tiny have ended" in caught.value.__notes__
    with pytest.raises(ValueError, match="must be one that generates"):
        roll.EngineClient(started, "actor_train")


INTERRUPTED = """
import json, os, signal, sys, threading
from pathlib import Path
import roll
from roll.strategies.engines.requests import SamplingParams
from tests.support.tiny_runs import TinyWorld, rlvr_settings

if __name__ == "__main__":
    try:
        with roll.Workers(rlvr_settings(TinyWorld(Path(sys.argv[1])), Path(sys.argv[2]))) as workers:
            engine = roll.EngineClient(workers)
            threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
            while True:
                engine.sample([[5, 6]] * 200, SamplingParams(max_new_tokens=30), num_samples=8).result()
    except KeyboardInterrupt as interrupt:
        print(json.dumps(interrupt.__notes__))
"""


@pytest.mark.long
@pytest.mark.e2e
def test_ctrl_c_ends_the_workers(world: TinyWorld, tmp_path: Path) -> None:
    script, output = tmp_path / "loop.py", tmp_path / "run"
    script.write_text(INTERRUPTED, encoding="utf-8")
    command = [sys.executable, str(script), str(world.folder), str(output)]
    said = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    assert json.loads(said.stdout.splitlines()[-1]) == ["the workers of tiny have ended"]
    assert "Traceback" not in (output / "logs/run.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"resume_from_checkpoint": True, "save_steps": 1}, "resume_from_checkpoint = true: has no effect on a loop"),
        ({"max_restarts": 1}, "max_restarts = 1: .*from Python it is not"),
        ({"max_steps": GONE}, r"max_steps.*: is needed: the learning rate's schedule ends there"),
    ],
)
def test_keys_of_a_run_that_a_loop_has_not_or_needs(
    changes: dict[str, Any], said: str, world: TinyWorld, tmp_path: Path
) -> None:
    with pytest.raises(roll.ConfigError, match=said):
        roll.Workers(changed(changes, dpo_settings(world, tmp_path)))
