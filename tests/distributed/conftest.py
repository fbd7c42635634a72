"""One Ray for the tests of a module, gone before the next: 4 logical devices on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roll.config.roles import WorkerConfig
from roll.distributed import Cluster, RayRuntime, ResourceManager, ray_runtime
from tests.distributed import light_workers

MakeCluster = Callable[..., Cluster]


def worker_path(name: str) -> str:
    """Dotted path of a worker class of this folder's tests."""
    return f"tests.distributed.{'light_workers' if hasattr(light_workers, name) else 'workers'}.{name}"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRuntime]:
    with ray_runtime(4, system_envs={"ROLL_TEST_GLOBAL": "everywhere"}, log_dir=tmp_path_factory.mktemp("logs")) as ray:
        yield ray


@pytest.fixture(scope="module")
def resources(runtime: RayRuntime) -> ResourceManager:
    return ResourceManager(4)


@pytest.fixture
def make_cluster(resources: ResourceManager) -> Iterator[MakeCluster]:
    """``make_cluster("BasicWorker", devices=[0, 1])``; ended without ceremony after the test."""
    made: list[Cluster] = []

    def make(worker: str, name: str = "role", devices: list[int] | None = None, **settings) -> Cluster:
        cluster_settings = {k: settings.pop(k) for k in ("seed", "settings", "rpc_timeout") if k in settings}
        role = WorkerConfig(name=name, device_mapping=devices, **settings)
        made.append(Cluster(name, worker_path(worker), resources, role, **cluster_settings))
        return made[-1]

    yield make
    for cluster in made:
        cluster.shutdown(graceful=False)


@pytest.fixture(scope="module")
def worker_logs(runtime: RayRuntime) -> Path:
    assert runtime.log_dir is not None
    return runtime.log_dir
