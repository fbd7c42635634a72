"""A Ray for several runs: ``python -m tests.support.serve_ray ADDRESS_FILE``, until its standard input closes."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from roll.distributed import ray_runtime
from roll.distributed.forked_workers import forked

IMPORTED = ["transformers.models.qwen2.modeling_qwen2", "roll.strategies.fsdp.fsdp2", "roll.strategies.hf_infer"]
INSTALLED = ["deepspeed", "peft"]


def main(address_file: Path) -> None:
    with forked(2, [*IMPORTED, *filter(find_spec, INSTALLED)]), ray_runtime(2) as runtime:
        written = address_file.with_suffix(".part")
        written.write_text(runtime.address)
        written.rename(address_file)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
