"""DataProto through Ray's object store, compared with the raw bytes of the same columns and with tensordict.

    python benchmarks/dataproto.py [--repeats 10] [--rows 1024] [--width 4096] [--mean-length 400]

Three batches with the columns of an RLVR training step (ids, two masks, four float columns, scores): *dense*, where no
row has padding; *padded*, right-padded to the same width; *small*, 256 x 80, as many of them move in each step of a
tiny run.  Each is put into the store and read back by

- ``raw``: ``ray.put/get`` of a dict of numpy arrays, the same padded bytes, the fastest that Ray can do;
- ``DataProto``: its wire format (padding removed, int64 narrowed);
- ``TensorDict``: tensordict's own pickling (left out where tensordict is not installed).

``put+get`` is up to holding the object; ``+copy`` makes every column a private, writable tensor too (raw
arrays are read-only until copied, TensorDict's tensors arrive copied).
Times are the best of the repeats, taken in turn; CPU is this process.  Throughput is padded bytes over wall time; the
ratio is that of ``raw``'s (goal: at least 0.8).
"""

from __future__ import annotations

import argparse
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
from rich.console import Console
from rich.table import Table

from roll.protocol import DataProto

Columns = dict[str, torch.Tensor]


@dataclass
class Subject:
    """One way of moving a batch: what is put, and how every column becomes a writable tensor."""

    name: str
    value: Any
    copy: Callable[[Any], list[torch.Tensor]]


def make_columns(rows: int, width: int, lengths: torch.Tensor) -> Columns:
    positions = torch.arange(width)
    attended = positions < lengths[:, None]
    response = attended & (positions >= lengths[:, None] // 4)
    columns = {
        "input_ids": torch.randint(1, 150_000, (rows, width)) * attended,
        "attention_mask": attended,
        "response_mask": response,
        "scores": torch.rand(rows),
    }
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages"):
        columns[name] = torch.randn(rows, width) * response
    return columns


def make_dense(rows: int, width: int) -> Columns:
    columns = make_columns(rows, width, torch.full((rows,), width))
    return {name: torch.randn_like(c) if c.is_floating_point() else c for name, c in columns.items()}


def subjects(columns: Columns) -> list[Subject]:
    found = [
        Subject(
            "raw",
            {name: column.numpy() for name, column in columns.items()},
            lambda got: [torch.from_numpy(array.copy()) for array in got.values()],
        ),
        Subject(
            "DataProto",
            DataProto.from_dict(columns),
            lambda got: list(got.batch.values()),
        ),
    ]
    try:
        from tensordict import TensorDict
    except ImportError:
        return found
    value = TensorDict(columns, batch_size=[len(columns["scores"])])
    found.append(Subject("TensorDict", value, lambda got: list(got.values())))
    return found


def stored_bytes(value: Any) -> int:
    """Bytes of the value in the store: the pickle stream and its out-of-band buffers."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(stream) + sum(buffer.raw().nbytes for buffer in buffers)


def measure(found: list[Subject], copy: bool, repeats: int) -> dict[str, tuple[float, float]]:
    """Best (wall, CPU) seconds of each subject; one warm-up, then ``repeats`` rounds in turn."""
    best = {subject.name: (float("inf"), float("inf")) for subject in found}
    for turn in range(repeats + 1):
        for subject in found:
            wall, cpu = time.perf_counter(), time.process_time()
            got = ray.get(ray.put(subject.value))
            if copy:
                subject.copy(got)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            del got
            if turn:
                best[subject.name] = (min(best[subject.name][0], wall), min(best[subject.name][1], cpu))
    return best


def report(title: str, columns: Columns, repeats: int, console: Console) -> None:
    padded = sum(column.nbytes for column in columns.values())
    found = subjects(columns)
    table = Table(title=f"{title}: {padded / 1e6:.1f} MB padded")
    for heading in ("", "stored MB", "put+get ms", "CPU ms", "GB/s", "ratio", "+copy ms", "CPU ms", "ratio"):
        table.add_column(heading, justify="right")
    moved, with_copy = measure(found, False, repeats), measure(found, True, repeats)
    for subject in found:
        (wall, cpu), (copy_wall, copy_cpu) = moved[subject.name], with_copy[subject.name]
        table.add_row(
            subject.name,
            f"{stored_bytes(subject.value) / 1e6:.2f}",
            f"{wall * 1e3:.2f}",
            f"{cpu * 1e3:.2f}",
            f"{padded / wall / 1e9:.2f}",
            f"{moved['raw'][0] / wall:.2f}",
            f"{copy_wall * 1e3:.2f}",
            f"{copy_cpu * 1e3:.2f}",
            f"{with_copy['raw'][0] / copy_wall:.2f}",
        )
    console.print(table)


def report_pickling(columns: Columns, console: Console, repeats: int = 200) -> None:
    """Time to pickle and unpickle a small batch, without Ray: it happens many times a step."""
    data = DataProto.from_dict(columns)
    dump, load = float("inf"), float("inf")
    for _ in range(repeats):
        buffers: list[pickle.PickleBuffer] = []
        begin = time.perf_counter()
        stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
        middle = time.perf_counter()
        pickle.loads(stream, buffers=buffers)
        dump, load = min(dump, middle - begin), min(load, time.perf_counter() - middle)
    console.print(f"small batch, no Ray: pickled in {dump * 1e3:.3f} ms, unpickled in {load * 1e3:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--mean-length", type=int, default=400)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    console = Console(width=120)
    rows, width, mean = options.rows, options.width, options.mean_length
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**31, configure_logging=False)
    try:
        report(f"dense {rows} x {width}", make_dense(rows, width), options.repeats, console)
        lengths = torch.randint(2, 2 * mean - 1, (rows,)).clamp(max=width)
        title = f"padded {rows} x {width}, mean length {lengths.float().mean():.0f}"
        report(title, make_columns(rows, width, lengths), options.repeats, console)
        small = make_columns(256, 80, torch.randint(10, 80, (256,)))
        report("small 256 x 80", small, 10 * options.repeats, console)
        report_pickling(small, console)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
