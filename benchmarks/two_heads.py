"""The tiny example's data and a warm start of its model with two heads of size 32, which all engines compute on a CPU.

    python -m benchmarks.two_heads FOLDER SEED

makes ``FOLDER/data`` and ``FOLDER/seed<SEED>/warm_start/model`` where they are not there.  The runs of
``benchmarks/reproduce.py engines`` start from it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples/tiny"


def warm_start(artifacts: Path, seed: int) -> Path:
    """The folder of the model."""
    model = artifacts / f"seed{seed}/warm_start/model"
    if not model.is_dir():
        script = (
            "import sys, prepare, tiny_model; tiny_model.HEADS = 2; "
            "prepare.prepare(prepare.Path(sys.argv[1]), [int(sys.argv[2])])"
        )
        subprocess.run([sys.executable, "-c", script, str(artifacts), str(seed)], cwd=TINY, check=True)
        words = [f"seed={seed}", f"pretrain={artifacts}/seed{seed}/init", f"output_dir={model.parent}"]
        words.append(f"sft_train.data_args.file_name={artifacts}/data/sft.jsonl")
        command = [sys.executable, "-m", "roll.cli", "run", str(TINY / "sft_config.yaml"), *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return model


if __name__ == "__main__":
    warm_start(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
