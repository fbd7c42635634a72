"""Roles that share devices take turns on them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.config.roles import GenerationWorkerConfig
from roll.pipelines.model_calls import GENERATION, TRAINING, WEIGHTS, Residency
from roll.pipelines.rows import RowsPipeline
from roll.strategies.base import StateKind
from tests.support.tiny_runs import TinyWorld, dpo_settings, load_changed


class Recorder:
    """A cluster that writes down what it is told, and what lies on its devices."""

    def __init__(self, name: str, states: frozenset[StateKind], told: list[str]) -> None:
        self.name, self.role = name, GenerationWorkerConfig()
        self.states: set[str] = set(states)
        self._told = told

    def call_all(self, method: Any, *arguments: Any) -> Any:
        getattr(self, method.__name__)(*arguments)
        answer = SimpleNamespace(result=list)
        answer.within = lambda seconds: answer
        return answer

    def offload_states(self, kinds: list[StateKind]) -> None:
        assert self.states.issuperset(kinds), "what is away already is not sent away"
        self.states -= set(kinds)
        self._told.append(f"{self.name} -")

    def load_states(self, kinds: list[StateKind]) -> None:
        self.states |= set(kinds)
        self._told.append(f"{self.name} +")

    def sleep(self) -> None:
        self.states.clear()
        self._told.append(f"{self.name} -")

    def wake(self, weights_only: bool) -> None:
        self.states |= WEIGHTS if weights_only else GENERATION
        self._told.append(f"{self.name} +")


def settle(devices: dict[str, list[int]]) -> tuple[Residency, dict[str, Recorder], list[str]]:
    """A run that has just been built."""
    sets = {name: set(ids) for name, ids in devices.items()}
    plans = {
        name: SimpleNamespace(
            device_mapping=tuple(ids),
            colocated_with=tuple(other for other in sets if other != name and sets[other] & sets[name]),
        )
        for name, ids in devices.items()
    }
    residency = Residency(SimpleNamespace(roles=plans), enabled=True)  # type: ignore[arg-type]
    told: list[str] = []
    kinds = {"actor_train": TRAINING, "critic": TRAINING, "reference": WEIGHTS, "actor_infer": GENERATION}
    clusters = {name: Recorder(name, kinds[name], told) for name in devices}
    for name, cluster in clusters.items():
        if residency.moves(name):
            residency.admit(cluster, kinds[name])  # type: ignore[arg-type]
    told.clear()
    return residency, clusters, told


def test_a_step_of_three_roles_on_the_same_devices() -> None:
    residency, clusters, told = settle({name: [0, 1] for name in ("actor_train", "reference", "actor_infer")})
    assert not any(cluster.states for cluster in clusters.values()), "each made room for the next"
    engine, trainer = clusters["actor_infer"], clusters["actor_train"]

    residency.bring({"actor_train": WEIGHTS, "actor_infer": WEIGHTS})
    assert (trainer.states, engine.states) == (WEIGHTS, WEIGHTS), "no KV cache and no moments next to both weights"
    residency.bring({"actor_infer": GENERATION})
    assert (trainer.states, engine.states) == (set(), GENERATION)
    residency.bring({"reference": WEIGHTS})
    assert (engine.states, clusters["reference"].states) == (set(), WEIGHTS)
    residency.bring({"actor_train": TRAINING})
    assert (clusters["reference"].states, trainer.states) == (set(), TRAINING)
    told.clear()
    residency.bring({"actor_train": WEIGHTS, "actor_infer": WEIGHTS})
    assert told == ["actor_train -", "actor_infer +"], "first out, then in"
    assert trainer.states == WEIGHTS


def test_what_nobody_else_needs_stays() -> None:
    residency, clusters, told = settle({"actor_train": [0], "critic": [0], "actor_infer": [1], "reference": [2, 1]})
    residency.bring({"actor_train": TRAINING})
    told.clear()
    residency.bring({"actor_infer": GENERATION})
    residency.bring({"actor_train": WEIGHTS})
    assert told == ["actor_infer +"], "other devices; and alone on its own, the trainer keeps its moments"
    residency.bring({"critic": WEIGHTS})
    assert told == ["actor_infer +", "actor_train -", "critic +"]
    assert clusters["actor_train"].states == set()
    assert set(residency.metrics()) == {
        "time/actor_train/onload/total",
        "time/actor_train/offload/total",
        "time/critic/onload/total",
        "time/critic/offload/total",
        "time/actor_infer/onload/total",
        "time/actor_infer/offload/total",
        "time/reference/offload/total",
    }
    assert not residency.metrics(), "told once"


def test_roles_with_devices_of_their_own_never_move() -> None:
    residency, _, told = settle({"actor_train": [0], "actor_infer": [1]})
    residency.bring({"actor_train": WEIGHTS, "actor_infer": WEIGHTS})
    assert not told
    assert not residency.metrics()


@pytest.mark.parametrize("offloads", [False, True])
def test_optimizer_states_leave_within_a_step_where_the_file_says_so(
    world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offloads: bool
) -> None:
    """:mod:`tests.strategies.test_offload` says that it changes nothing else."""
    key = "is_offload_optimizer_states_in_train_step"
    pipeline = RowsPipeline(load_changed(dpo_settings(world, tmp_path), {key: offloads}))

    class Started(Exception):
        """The first cluster is to start."""

    def start(config: Any, name: str, worker: str, resources: Any, role: Any, settings: Any) -> Any:
        raise Started(name, settings.offload_optimizer_in_steps)

    monkeypatch.setattr("roll.pipelines.rows.start_cluster", start)
    resources: Any = None
    with pytest.raises(Started) as caught:
        pipeline.start(resources)
    assert caught.value.args == ("actor_train", offloads)
