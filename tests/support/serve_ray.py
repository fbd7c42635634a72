"""A Ray for several runs: ``python -m tests.support.serve_ray ADDRESS_FILE``, until its standard input closes."""

from __future__ import annotations

import sys
from pathlib import Path

from roll.distributed import ray_runtime
from tests.support.warm_workers import warm_workers


def main(address_file: Path) -> None:
    with warm_workers(), ray_runtime(2) as runtime:
        written = address_file.with_suffix(".part")
        written.write_text(runtime.address)
        written.rename(address_file)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
