"""A driver that a test starts, watches and kills: ``python run_in_ray.py HOW RESULT_FILE``.

It starts Ray with two workers that each leave a child behind, writes what it started to RESULT_FILE, and then ends
as HOW says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from roll.config.roles import WorkerConfig
from roll.distributed import Cluster, ResourceManager, ray_runtime
from roll.distributed.guard import RAY_FOLDER
from roll.distributed.signals import ending
from tests.distributed.light_workers import BasicWorker


def main(how: str, result_file: Path) -> None:
    with ray_runtime(2) as runtime:
        cluster = Cluster("role", BasicWorker, ResourceManager(2), WorkerConfig(device_mapping=[0, 1]))
        children = cluster.call_all(BasicWorker.spawn_child).result()
        mark = cluster.call_all(BasicWorker.describe).result()[0]["environment"]["ROLL_RUN_MARK"]
        locks = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.exists(link.path)]
        folder = next(Path(link).parent / RAY_FOLDER for link in locks if link.endswith("/driver.lock"))
        found = {"mark": mark, "children": children, "address": runtime.address, "folder": str(folder)}
        written = result_file.with_suffix(".part")
        written.write_text(json.dumps(found))
        written.rename(result_file)
        if how == "failure":
            raise RuntimeError("the run failed on purpose")
        if how == "wait":
            time.sleep(120)
        if how == "hold":
            with ending.holding():
                time.sleep(120)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
