"""DeepSpeed is optional, and needs no compiler on a CPU host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from roll.config.installation import install_command
from roll.config.loader import load_config
from roll.platforms import CPU
from roll.strategies.deepspeed.strategy import join_process_group

ROOT = Path(__file__).parents[3]
WITHOUT_COMPILER = """
import os, sys
os.environ["PATH"] = ""
os.environ["TORCH_EXTENSIONS_DIR"] = sys.argv[2]
import roll.strategies.deepspeed
assert "deepspeed" not in sys.modules, "only a role that uses it imports it"
import torch.distributed as dist
from roll.strategies.base import Output
from roll.strategies.base import create_strategy
from tests.strategies.samples import make_batch, make_role, policy_loss
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/store", rank=0, world_size=1)
config = {"zero_stage": 3, "offload": "cpu", "offload_param": True}
strategy = create_strategy(make_role(sys.argv[1], "deepspeed_train", config=config))
strategy.initialize(num_training_steps=2)
metrics = strategy.train_step(make_batch(), policy_loss, (Output.LOG_PROBS, Output.ENTROPY))
assert metrics["grad_norm"].value() > 0
dist.destroy_process_group()
"""


EXAMPLES = sorted((ROOT / "examples/deepspeed").glob("zero*.yaml"))


@pytest.mark.long
def test_an_example_is_what_its_name_says():
    assert len(EXAMPLES) == 6
    for file in EXAMPLES:
        plan = load_config(None, file, overrides=["adv_estimator=gae"], check_files=False).plan
        for name in ("actor_train", "critic"):
            config = plan.roles[name].section.strategy_args.strategy_config
            offload = "cpu" if file.stem.endswith("cpu_offload") else "none"
            assert (config["zero_stage"], config["offload"]) == (int(file.stem[4]), offload), (file, name)


def test_without_deepspeed_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=re.escape(install_command("deepspeed"))):
        join_process_group(CPU)


@pytest.mark.long
def test_a_host_without_compiler_trains_with_offload(tied_model, tmp_path):
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-c", WITHOUT_COMPILER, str(tied_model), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
