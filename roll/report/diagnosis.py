from __future__ import annotations
from roll.report.run_files import Run
def diagnose(run: Run):
    return []
