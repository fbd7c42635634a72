"""docs/verification.md names tests that exist."""

from __future__ import annotations

import re

from tests.examples.pages import ROOT

ROW = re.compile(r"^\| .* \| (.+) \|$", re.MULTILINE)


def test_every_guard_exists() -> None:
    missing = []
    for cell in ROW.findall((ROOT / "docs/verification.md").read_text(encoding="utf-8")):
        names = re.findall(r"`([^`]+)`", cell)
        files = [ROOT / name for name in names if name.endswith(".py")]
        files.append(ROOT / "tests/pipelines/test_known_faults.py")  # the page leaves it out
        missing += [str(file) for file in files if not file.is_file()]
        text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        missing += [name for name in names if name.startswith("test_") and f"def {name}(" not in text]
    assert missing == []


COUNTS = {"DPO": 12, "RM": 5, "Distillation": 12, "OPD": 10, "Evaluation": 7, "SFT": 8, "Agents": 22, "Shape": 4}
"""Known faults by pipeline; their tests begin with ``test_dpo_01`` and so on."""
NUMBERED = re.compile(rf"^\| ({'|'.join(COUNTS)}) (\d+): ", re.MULTILINE)
KINDS = {"dpo": "DPO", "distill": "Distillation", "opd": "OPD", "evaluate": "Evaluation", "sft": "SFT"}
KINDS["fault"] = "Agents"


def test_every_known_fault_has_its_row_and_every_test_of_one_stands_in_it() -> None:
    page = (ROOT / "docs/verification.md").read_text(encoding="utf-8")
    found = [(kind, int(number)) for kind, number in NUMBERED.findall(page)]
    assert found == [(kind, number) for kind, count in COUNTS.items() for number in range(1, count + 1)]
    rows = {tuple(line[2:].split(":")[0].split()): line for line in page.splitlines() if NUMBERED.match(line)}
    files = [*(ROOT / "tests/pipelines").glob("test_*.py"), ROOT / "tests/agents/test_known_faults.py"]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    tests = re.findall(rf"^(?:async )?def (test_({'|'.join(KINDS)})_(\d\d)_\w+)", text, re.MULTILINE)
    assert len(tests) > 20
    for name, kind, number in tests:
        assert f"`{name}`" in rows[KINDS[kind], str(int(number))], name
