"""Instruments of several benchmarks: time of the device, and peak memory of a process."""

from __future__ import annotations

import resource
import time

import torch


def clock(device: torch.device) -> float:
    """Seconds: the processor's on the CPU, which other work does not lengthen; the clock's once CUDA is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def peak_bytes(device: torch.device) -> int:
    """Most memory so far: of the device on CUDA, else of the process, which never shrinks again."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
