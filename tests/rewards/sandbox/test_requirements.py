"""A host that gives less than is promised is refused before a run starts, unless the configuration accepts that."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from roll.config.loader import load_config
from roll.rewards import RewardOptionError, RewardSample, build_reward, code_sandbox
from roll.rewards.base import GuardedReward
from roll.rewards.code_sandbox import CodeSandbox
from roll.rewards.registry import Component, CompositeReward
from roll.rewards.sandbox.client import Sandbox, Settings
from roll.rewards.sandbox.protections import CONSEQUENCES, MEANS, PROMISED, PROTECTIONS, MissingProtection

EXAMPLES = Path(__file__).parents[3] / "examples/rewards"
NO_LANDLOCK = ("namespaces", "mounts", "landlock", "uid")
GOOD = RewardSample("", "print(42)", {"inputs": [""], "outputs": ["42"]})


@pytest.fixture
def poor(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host as one without namespaces and Landlock."""
    monkeypatch.setattr(code_sandbox, "Settings", partial(Settings, without=NO_LANDLOCK))


def test_what_a_host_lacks_is_found_out_and_can_be_required() -> None:
    bare = Sandbox(Settings(without=MEANS))
    report = bare.start()
    bare.close()
    assert set(report.missing) == set(PROTECTIONS) - {"limits"}
    assert "this host does not give: network" in report.line()
    with pytest.raises(MissingProtection, match=r"network \(no connection to anything"):
        Sandbox(Settings(without=MEANS, require=("limits", "network"))).start()


@pytest.mark.long
@pytest.mark.usefixtures("poor")
def test_a_host_that_gives_too_little_is_refused() -> None:
    rule = CodeSandbox()
    with pytest.raises(
        MissingProtection, match=r"does not give files .*; private .*accept with require: .*checkpoints"
    ):
        CompositeReward([Component("code", GuardedReward("code", rule))]).prepare()
    (refused,) = GuardedReward("code", rule)([GOOD])
    assert refused.score is None
    assert "files" in (refused.error or "")
    rule.close()


@pytest.mark.usefixtures("poor")
def test_the_check_before_a_run_names_the_component() -> None:
    reward = CompositeReward([Component("code", GuardedReward("code", CodeSandbox()))])
    with pytest.raises(RewardOptionError, match="does not give files") as raised:
        reward.check_host()
    assert raised.value.component == "code"
    CodeSandbox(require=[]).check_host()
    CodeSandbox(service_url="http://127.0.0.1:1/score").check_host()


@pytest.mark.usefixtures("poor")
@pytest.mark.parametrize("require", [[], ["limits", "network", "signals", "syscalls", "ends"]])
def test_an_accepted_risk_is_named(require: list[str], caplog: pytest.LogCaptureFixture) -> None:
    rule = CodeSandbox(require=require)
    with caplog.at_level(logging.INFO):
        (result,) = rule([GOOD])
        rule([GOOD])
    rule.close()
    assert result.score == 1.0
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "this host does not give: files, private" in record.getMessage()
    assert "accepted by require: programs that the model writes may write, change and delete" in record.getMessage()


def test_what_the_host_gives_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rule = build_reward("code_sandbox", {"require": []})
    with caplog.at_level(logging.INFO):
        rule([GOOD])
        rule([GOOD])
    line = CompositeReward([Component("code", GuardedReward("code", rule))]).prepare()
    rule.close()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", line)]
    assert line.startswith("code sandbox: limits, network, files")


def test_names_of_protections() -> None:
    assert set(CONSEQUENCES) == set(PROTECTIONS) > set(PROMISED)


@pytest.mark.parametrize("name", ["code_sandbox", "multi_domain"])
def test_shipped_recipes_require_what_is_promised(name: str) -> None:
    section = load_config(None, EXAMPLES / f"{name}.yaml", check_files=False).config.rewards["code"]
    assert set(section.reward_kwargs["require"]) == set(PROMISED)


@pytest.mark.long
@pytest.mark.parametrize(("lacks", "status"), [({"no_landlock": True}, 2), ({}, 0)])
def test_roll_check_on_such_a_host(lacks: dict[str, bool], status: int) -> None:
    """The command itself, in a process that may not make namespaces: Docker's default with and without Landlock."""
    if os.geteuid() != 0:
        pytest.skip("only the superuser can give up what this host gives")
    host = json.dumps({"no_namespaces": True, "docker_capabilities": True, **lacks})
    launcher = [sys.executable, str(Path(__file__).with_name("poorer_host.py")), host]
    command = [sys.executable, "-m", "roll.cli", "check", "--skip-files", str(EXAMPLES / "code_sandbox.yaml")]
    ended = subprocess.run([*launcher, *command], capture_output=True, text=True, cwd=EXAMPLES.parents[1], check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    if status:
        assert "rewards.code.reward_kwargs" in ended.stderr
        assert "this host does not give files" in ended.stderr
