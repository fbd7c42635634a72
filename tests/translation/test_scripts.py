"""Launch scripts are run, not parsed: each feature of the shell reaches the translation as bash means it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from roll.config.reading.errors import ConfigError
from roll.rewards.sandbox.client import Sandbox, Settings
from roll.translation import command, recording
from roll.translation.reading import Source, read_recording
from roll.translation.recording import REQUIRED, record

RUN = "python3 -m verl.trainer.main_ppo"
BATCH = "data.train_batch_size"


FEATURES: dict[str, tuple[str, int]] = {}
for block in f"\n{Path(__file__).with_name('scripts.txt').read_text(encoding='utf-8')}".split("\n=== ")[1:]:
    title, _, script = block.partition("\n")
    number, _, feature = title.partition(" ")
    FEATURES[feature] = (script.replace("<run>", RUN).replace("<batch>", BATCH), int(number))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(Settings(require=REQUIRED))
    yield box
    box.close()


def run(
    folder: Path, text: str, sandbox: Sandbox, *arguments: str, call: int | None = None, **variables: str
) -> Source:
    file = folder / "run.sh"
    file.write_text(text, encoding="utf-8")
    return read_recording(record(file, arguments, variables, sandbox), file.name, call)


SLOW = "waiting for nodes"
"""Its loop ends when the limit of a script's time is reached."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == SLOW else ()) for name in FEATURES]
)
def test_features_of_the_shell(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    text, expected = FEATURES[name]
    source = run(tmp_path, text, sandbox)
    assert source.keys[BATCH] == expected
    assert source.launcher == "verl.trainer.main_ppo" and source.from_module


def test_variables_that_are_not_set_are_read_where_the_run_starts(tmp_path: Path, sandbox: Sandbox) -> None:
    text = f'{RUN} data.train_files=$HOME/d.parquet trainer.default_local_dir="${{CKPTS}}/x" trainer.nnodes=${{N:-2}}'
    source = run(tmp_path, text, sandbox)
    assert source.keys["data.train_files"] == "${oc.env:HOME}/d.parquet"
    assert source.keys["trainer.default_local_dir"] == "${oc.env:CKPTS}/x"
    assert source.keys["trainer.nnodes"] == 2
    assert source.unset == ("HOME", "CKPTS")
    assert run(tmp_path, text, sandbox, CKPTS="/ckpts").keys["trainer.default_local_dir"] == "/ckpts/x"


def test_an_unset_number_is_not_taken_as_zero(tmp_path: Path, sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match="NODES is not set"):
        run(tmp_path, f"{RUN} {BATCH}=$((NODES * 8)) trainer.nnodes=$NODES", sandbox)
    with pytest.raises(ConfigError, match=r"echo \$KEY / SIZE is not set, and the script computes"):
        run(tmp_path, f"echo echo $KEY\n{RUN} {BATCH}=$((2 * SIZE))", sandbox)
    assert run(tmp_path, f"{RUN} {BATCH}=$((NODES * 8)) trainer.nnodes=$NODES", sandbox, NODES="2").keys[BATCH] == 16


def test_arguments_and_exports_reach_the_run(tmp_path: Path, sandbox: Sandbox) -> None:
    text = f'export VERL_ENABLE_PARAM_OFFLOAD=1\nlocal_only=1\nNCCL_DEBUG=INFO {RUN} {BATCH}=8 "$@"'
    source = run(tmp_path, text, sandbox, f"{BATCH}=16")
    assert source.keys[BATCH] == 16
    assert source.environment == {"VERL_ENABLE_PARAM_OFFLOAD": "1", "NCCL_DEBUG": "INFO"}


def test_files_that_a_script_names_come_along(tmp_path: Path, sandbox: Sandbox) -> None:
    """From its own folder and those of the files that they name; nothing else of the folder."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "env.sh").write_text('source "$(dirname "${BASH_SOURCE[0]}")/parts/more.sh"\n', encoding="utf-8")
    (tmp_path / "parts/more.sh").write_text("export b=232\n", encoding="utf-8")
    (tmp_path / "run_all.sh").write_text(f'{RUN} {BATCH}=$b "$@"', encoding="utf-8")
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    text = 'here="$(cd "$(dirname "$0")" && pwd)"\nsource "$here/env.sh"\n'
    text += 'bash "$here/run_all.sh" trainer.experiment_name="$(cat secret.txt)x" trainer.default_local_dir="$here/out"'
    source = run(tmp_path, text, sandbox)
    assert source.keys[BATCH] == 232
    assert source.keys["trainer.experiment_name"] == "x"
    assert source.keys["trainer.default_local_dir"] == f"{tmp_path}/out"


def test_of_several_runs_the_first_is_taken(tmp_path: Path, sandbox: Sandbox) -> None:
    text = f"for b in 8 16; do {RUN} {BATCH}=$b; done"
    source = run(tmp_path, text, sandbox)
    assert source.keys[BATCH] == 8
    assert source.remarks == ["the first of 2 runs: --call N takes another"]
    several = run(tmp_path, f"{text}\n{RUN} {BATCH}=24 trainer.seed=1", sandbox)
    assert several.keys == source.keys
    assert several.remarks == ["the first of 3 runs: --call N takes another"]
    assert any("trainer.seed=1" in words for words in several.left_out)
    assert [run(tmp_path, text, sandbox, call=call).keys[BATCH] for call in (1, 2)] == [8, 16]
    with pytest.raises(ConfigError, match="must be from 1 to 2"):
        run(tmp_path, text, sandbox, call=3)


@pytest.mark.parametrize(
    "question",
    [
        "from verl.utils.device import get_device_name; print(get_device_name() == 'cuda')",
        "import torch; print(torch.cuda.is_available() and torch.cuda.device_count() == 8)",
        "from __future__ import annotations; import sys; print(sys.argv[-1] in ('-', '-c'))",
    ],
)
def test_a_script_that_asks_for_the_device_finds_a_node_with_accelerators(
    question: str, tmp_path: Path, sandbox: Sandbox
) -> None:
    heredoc = f"- <<'EOF'\n{question}\nEOF\n"
    for asked in (f'python3 -c "{question}"', f"python3 {heredoc}", f"uv run --frozen --extra vllm python3 {heredoc}"):
        text = f'set -e\nfound=$({asked})\nif [ "$found" == "True" ]; then {RUN} {BATCH}=8; else exit 1; fi'
        assert run(tmp_path, text, sandbox).keys[BATCH] == 8
    with pytest.raises(ConfigError, match="No module named 'numpy'"):
        run(tmp_path, "set -e\nn=$(python3 -c 'import numpy')\nexit 1", sandbox)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo nothing", "starts no training program"),
        ('if [ $# -lt 2 ]; then echo "usage: run.sh NODES PATH"; fi', "it printed: usage: run.sh NODES PATH"),
        ("bash ../other/train.sh", "starts ../other/train.sh, which is not here"),
        ("python3 tools/merge.py --x 1", "starts tools/merge.py, which is no training program of verl or SkyRL"),
        (f"{RUN} {BATCH}=$'a\\e[2Jb'", "control characters"),
    ],
    ids=["none", "usage", "absent", "other", "terminal"],
)
def test_scripts_without_a_run_say_why(text: str, reason: str, tmp_path: Path, sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(tmp_path, text, sandbox)


def test_a_size_that_the_shell_cannot_compute_says_so(tmp_path: Path, sandbox: Sandbox) -> None:
    long = " ".join(f"trainer.a{number}={number}" for number in range(300))
    (tmp_path / "run.sh").write_text(f"set -x\nper=4x\nn=$((per * 2))\n{RUN} {BATCH}=$n {long}\n")
    with pytest.raises(ConfigError, match=r"train_batch_size = '': is empty: .*line 3: 4x: value too great for base"):
        read_recording(record(tmp_path / "run.sh", sandbox=sandbox), "run.sh")


def test_keys_after_a_line_that_ends_the_command_are_told(tmp_path: Path, sandbox: Sandbox) -> None:
    """A backslash is missing, or a comment stands among the continued lines."""
    whole = run(tmp_path, f"{RUN} {BATCH}=8 \\\n    trainer.nnodes=2", sandbox)
    assert whole.keys == {BATCH: 8, "trainer.nnodes": 2} and not whole.remarks
    for cut in ("\n", " \\\n    # more\n"):
        source = run(tmp_path, f"{RUN} {BATCH}=8{cut}    +trainer.nnodes=2 \\\n    trainer.test_freq=1", sandbox)
        assert source.keys == {BATCH: 8}
        assert source.remarks[0].startswith("+trainer.nnodes=2 and what follows reach no run")


def test_a_comment_sets_no_variable(tmp_path: Path, sandbox: Sandbox) -> None:
    text = f"# its local address against MASTER_ADDR\nif [ $(hostname) == $MASTER_ADDR ]; then {RUN} {BATCH}=8; fi"
    (tmp_path / "run.sh").write_text(text, encoding="utf-8")
    assert read_recording(record(tmp_path / "run.sh", sandbox=sandbox), "run.sh").keys == {BATCH: 8}


def test_an_interpreter_that_a_check_misses_is_stood_in_for(tmp_path: Path, sandbox: Sandbox) -> None:
    text = f'P=$HOME/own/bin/python\n[[ -x $P ]] || exit 1\n"$P" {RUN.removeprefix("python3 ")} {BATCH}=8'
    (tmp_path / "run.sh").write_text(text, encoding="utf-8")
    assert read_recording(record(tmp_path / "run.sh", sandbox=sandbox), "run.sh").keys == {BATCH: 8}


@pytest.mark.long
def test_an_endless_script_says_why(tmp_path: Path, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LIMITS", replace(recording.LIMITS, wall=2.0))
    with pytest.raises(ConfigError, match="starts no training program"):
        run(tmp_path, "while true; do :; done", sandbox)


def test_the_command_runs_scripts_and_only_programs_of_the_shell(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f'{RUN} {BATCH}=$(({{1,}} 4 * SIZE)) "$@"'.replace("{1,}", ""), encoding="utf-8")
    source = command.read(["SIZE=3", "bash", str(file), "trainer.nnodes=2"])
    assert source.keys == {BATCH: 12, "trainer.nnodes": 2}
    pasted = command.read_pasted(f"n=3\nif true; then {RUN} {BATCH}=$((n * 4)); fi")
    assert pasted.keys == {BATCH: 12}
    plain = command.read_pasted(f"n=3\n{RUN} {BATCH}=$n")
    assert plain.keys == {BATCH: 3}
