"""examples/cluster, compose.yaml and the scripts, read by the programs of those who use them: SkyPilot, the schemas of
Kubernetes, the compose specification, shellcheck. ``make test-cluster`` installs them; each refuses a broken file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
WHY = "installed by `make test-cluster`"
pytestmark = pytest.mark.long

KUBERNETES = "1.30"
"""An older release than most clusters have: what it knows, they know."""


def pods(text: str) -> list[dict[str, Any]]:
    """Each group's template as an object of its own, which is what KubeRay makes a pod of."""
    cluster = yaml.safe_load(text)["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "roll"}, "template": group["template"]}
        for group in groups
    ]


@pytest.mark.parametrize(("old", "new"), [("", ""), ("runAsNonRoot:", "runAsNoRoot:")])
def test_pods_are_what_kubernetes_knows(old: str, new: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason=WHY)
    text = (FOLDER / "kuberay.yaml").read_text()
    assert old in text
    made = pods(text.replace(old, new))
    assert len(made) == 2
    for pod in made:
        if old:
            with pytest.raises(kubernetes.ValidationError):
                kubernetes.validate(pod, KUBERNETES, strict=True)
        else:
            kubernetes.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize(("old", "new"), [("", ""), ("num_nodes: 2", "num_node: 2")])
def test_skypilot_reads_its_task(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where it keeps logs and a data base
    sky = pytest.importorskip("sky", reason=WHY)
    text = (FOLDER / "skypilot.yaml").read_text()
    assert old in text
    (tmp_path / "task.yaml").write_text(text.replace(old, new))
    if old:
        with pytest.raises((ValueError, TypeError, sky.exceptions.InvalidSkyPilotConfigError)):
            sky.Task.from_yaml(str(tmp_path / "task.yaml"))
        return
    task = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    assert task.num_nodes == 2 and task.envs["OUTPUT_DIR"].startswith("/runs/")
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 8}
    assert task.storage_mounts.keys() == {"/runs"}


@pytest.mark.parametrize(("old", "new", "said"), [("", "", ""), ("shm_size: 1gb", "shm_sizes: 1gb", "shm_sizes")])
def test_compose_reads_its_file(old: str, new: str, said: str) -> None:
    compose_spec = pytest.importorskip("compose_spec", reason=WHY)
    text = (ROOT / "compose.yaml").read_text()
    assert old in text
    merged = yaml.safe_dump(yaml.safe_load(text.replace(old, new)))  # it knows no merge keys, which compose does
    if old:
        with pytest.raises(ValueError, match=said):
            compose_spec.PyCompose.from_yaml(merged)
    else:
        assert compose_spec.PyCompose.from_yaml(merged).service_names() == ["node0", "node1", "warm-start"]


def test_shellcheck(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip(WHY)
    found_in = [file for folder in ("examples", "tests") for file in sorted((ROOT / folder).rglob("*.sh"))]
    scripts = [str(file.relative_to(ROOT)) for file in found_in] + [".ci/run"]
    assert "examples/cluster/slurm.sh" in scripts
    found = subprocess.run([program, *scripts], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    text = (FOLDER / "slurm.sh").read_text()
    broken = tmp_path / "slurm.sh"
    broken.write_text(text.replace('"$SLURM_JOB_NODELIST"', "$SLURM_JOB_NODELIST"))
    assert "SC2086" in subprocess.run([program, broken], capture_output=True, text=True, check=False).stdout
