"""compose.yaml and the Dockerfile, as far as they can be read: building and running them is ``make docker-test``."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from roll.distributed.nodes import NodeEnvironment, auth_problem

ROOT = Path(__file__).parents[2]


def test_compose_starts_two_nodes_that_share_a_secret() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    nodes = {name: each for name, each in compose["services"].items() if "RANK" in each["environment"]}
    assert [NodeEnvironment.from_environ(each["environment"]).rank for each in nodes.values()] == [0, 1]
    for each in nodes.values():
        environ = NodeEnvironment.from_environ(each["environment"])
        assert (environ.world_size, environ.master_addr) == (2, "node0")
        assert auth_problem(each["environment"]) is None
        assert each["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?"), "no secret in the file"
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
