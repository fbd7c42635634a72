"""compose.yaml and the Dockerfile, as far as they can be read: building and running them is ``make docker-test``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from roll.config.pipelines import definitions
from roll.distributed.nodes import NodeEnvironment, require_token
from tests.distributed.hosts import ROOT

WORKDIR = "/home/roll/roll"
VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:[-?])([^}]*(?:\([^)]*\))?[^}]*))?\}|(\w+))")
TEXT = (ROOT / "compose.yaml").read_text()
TOKEN = {"RAY_AUTH_TOKEN": "5ec2e7"}


def interpolated(value: Any, environ: Mapping[str, str]) -> Any:
    """``${NAME}``, ``${NAME:-default}``, ``${NAME:?error}`` and ``$$`` in all texts."""

    def put(match: re.Match[str]) -> str:
        dollar, name, how, word, plain = match.groups()
        word = (word or "").replace("$$", "$")
        if dollar:
            return "$"
        found = environ.get(name or plain, "")
        if not found and how == ":?":
            raise ValueError(f"required variable {name} is missing a value: {word}")
        return found or word

    if isinstance(value, dict):
        return {key: interpolated(each, environ) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, environ) for each in value]
    return VARIABLE.sub(put, value) if isinstance(value, str) else value


def read(environ: Mapping[str, str]) -> dict[str, Any]:
    """The file with variables put in; ``test_cluster_programs.py`` holds it against the specification."""
    project: dict[str, Any] = interpolated(yaml.safe_load(TEXT), environ)
    return project


def test_variables() -> None:
    with pytest.raises(ValueError, match=r"RAY_AUTH_TOKEN is missing .*=\$\(openssl rand -hex 32\)"):
        read({})
    node = read(TOKEN)["services"]["node0"]
    assert node["command"][-1].endswith(".py num_gpus_per_node=1") and node["build"]["args"] == {"DEVICE": "cpu"}
    assert node["environment"]["RAY_AUTH_TOKEN"] == TOKEN["RAY_AUTH_TOKEN"]
    node = read({**TOKEN, "RECIPE": "max_steps=1", "DEVICE": "cuda"})["services"]["node0"]
    assert node["command"][-1].endswith(".py max_steps=1") and node["build"]["args"] == {"DEVICE": "cuda"}
    assert all(each.partition(":")[2].startswith(WORKDIR + "/") for each in node["volumes"])
    assert f"WORKDIR {WORKDIR}\n" in (ROOT / "Dockerfile").read_text()


def test_compose_starts_two_nodes_that_share_a_secret() -> None:
    compose = read(TOKEN)
    nodes = {name: each for name, each in compose["services"].items() if "RANK" in each["environment"]}
    assert [NodeEnvironment.from_environ(each["environment"]).rank for each in nodes.values()] == [0, 1]
    for each in nodes.values():
        environ = NodeEnvironment.from_environ(each["environment"])
        assert (environ.world_size, environ.master_addr) == (2, "node0")
        require_token(environ, each["environment"])
        assert each["cap_drop"] == ["ALL"] and each["security_opt"] == ["no-new-privileges:true"]
        assert each["depends_on"] == {"warm-start": {"condition": "service_completed_successfully"}}
        assert not each.get("ports"), "nothing is published"
    assert compose["networks"] == {"run": {"internal": True}}
    mounted = {volume.partition(":")[0] for each in nodes.values() for volume in each["volumes"]}
    assert set(compose["volumes"]) == mounted


def test_the_image_has_a_user_of_its_own_and_pinned_packages() -> None:
    text = (ROOT / "Dockerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER roll$", last, re.MULTILINE)
    assert not re.search(r"^(RUN|COPY|ADD) ", last.partition("\nUSER roll")[2], re.MULTILINE)
    assert text.count("-c constraints/cpu.txt") == 1 and "ARG TORCH=torch==" in text
    assert not re.search(r"^(ARG|ENV) .*(TOKEN|PASSWORD|SECRET|_KEY)", text, re.MULTILINE)
    assert "--mount=type=secret" in text
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".env*", "**/*.pem", "**/*.key", "**/auth_token"} <= set(ignored)


def test_every_pipeline_is_started_in_a_container() -> None:
    """The rows of docs/installation.md name every pipeline of the registry, and scripts that are there."""
    section = (ROOT / "docs/installation.md").read_text().partition("## In a container")[2]
    rows = re.findall(r"^\| `(\w+)`[^|]* \| (`python .*) \|$", section, re.MULTILINE)
    assert {name for name, _ in rows} == {entry.name for entry in definitions()}
    scripts = [script for _, command in rows for script in re.findall(r"python (\S+\.py)", command)]
    assert len(scripts) >= len(rows) and all((ROOT / script).is_file() for script in scripts)
