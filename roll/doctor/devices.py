"""Trials of the devices, for ``roll doctor --gpu``: memory, copies, arithmetic, attention, and weights handed from one
process to another.

The same code tries a GPU and, with ``ROLL_PLATFORM=cpu``, the processor. What a CPU has no form of is a note.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import permutations
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from roll.doctor.trials import Command, Finding, Severity, did, failures, found, judge, trials
from roll.platforms import current_platform
from roll.rehearsal.catalog import GIB, gpu_of

if TYPE_CHECKING:
    from torch import Tensor

SECONDS = 60.0  # deadline of a trial
LEAST_FREE, LEAST_FREE_OF_HOST = 0.9, 0.25
LEAST_LINK = 6e9
"""Bytes a second of a copy from pinned memory, or to another device: half of what PCIe 3.0 with 16 lanes carries."""
TOLERANCE = 2**-6
"""Relative error, of Euclidean norms, of a result in bf16: four times what is lost when it is rounded to 8 bits."""
_PRODUCT_SECONDS, _LARGEST = 0.005, 1 << 14
_REPEATS = 5
BROKEN = (
    "out of memory: end what else is on the device; busy: nvidia-smi -c DEFAULT lets several processes have it; no "
    "kernel: install the build of PyTorch for this driver; wrong values: leave the device out (CUDA_VISIBLE_DEVICES)"
)


def try_memory() -> Iterator[Finding]:
    """Free memory of every device, and bytes a second between it, the host and the other devices."""
    here, outcomes = current_platform(), trials([(memory,)], SECONDS)
    yield from outcomes[0].findings
    rule = "copies end, and bring the values that were sent"
    yield from failures("copies", rule, f"{BROKEN}; between devices: NCCL_P2P_DISABLE=1, and no IOMMU", outcomes)
    yield from _absent(*(["pinned memory"] if not here.pin_memory else []), "peer access")


def try_arithmetic() -> Iterator[Finding]:
    """A matrix product, attention and the transport ``cuda_ipc`` on every device."""
    here = current_platform()
    kinds: dict[str, tuple[Callable[[str], None], str]] = {
        "matrix product": (matrix, BROKEN),
        "attention": (attention, f"{BROKEN}; or use model_args.dtype: fp32"),
    }
    if here.device_type == "cuda":
        remedy = "containers need --ipc=host; weight_sync.transport: shared_memory goes through the host instead"
        kinds["cuda_ipc"] = (hand_over, remedy)
    tried = [(name, str(index)) for index in range(here.device_count()) for name in kinds]
    commands: list[Command] = [(kinds[name][0], index) for name, index in tried]
    for (name, index), outcome in zip(tried, trials(commands, SECONDS), strict=True):
        yield from outcome.findings
        yield from failures(f"device {index}: {name}", "ends, with the right values", kinds[name][1], [outcome])
    yield from _absent("cuda_ipc")


def _absent(*names: str) -> Iterator[Finding]:
    """Notes of what only CUDA's devices have."""
    here = current_platform()
    value = "not on a CPU" if here.name == "cpu" else f"not on {here.name}"
    for what in names if here.device_type != "cuda" else ():
        yield Finding(what, value, "is tried on a GPU", Severity.NOTE, "nothing: runs do without it here")


# Memory


def memory() -> None:
    import torch

    here = current_platform()
    devices = range(here.device_count())
    for index in devices:
        # Before this process has memory of it.
        held = holders(str(torch.cuda.get_device_properties(index).uuid)) if here.name == "cuda" else []
        free, total = here.free_memory(index)
        least = LEAST_FREE_OF_HOST if here.name == "cpu" else LEAST_FREE
        value = f"{here.device_name(index)}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        value += f"; {', '.join(held)}" if held else ""
        remedy = "end what holds it (processes of other containers are not seen), or lower gpu_memory_utilization"
        rule, data = f"{least:.0%} free", {"free": free, "total": total, "holders": held}
        found(judge(f"device {index}: memory", value, rule, free >= least * total, remedy, data=data))
    source = torch.arange(16 << 20 if here.name == "cpu" else 32 << 20, dtype=torch.int32)
    for index in devices:
        rates: dict[str, tuple[float, float]] = {}
        for kind in ("pageable", "pinned") if here.pin_memory else ("pageable",):
            host = source.pin_memory() if kind == "pinned" else source
            back = torch.zeros_like(source, pin_memory=kind == "pinned")
            device = torch.empty_like(source, device=here.device(index))
            rates[kind] = _rate(device, host, index), _rate(back, device, index)
            if not torch.equal(back, source):
                raise RuntimeError(f"device {index}: copies by {kind} memory bring wrong values")
        found(judge_copies(index, rates))
    rates_of_pairs: dict[tuple[int, int], tuple[bool, float]] = {}
    for one, other in permutations(devices, 2) if here.device_type == "cuda" else ():
        sent, received = source.to(here.device(one)), torch.zeros_like(source, device=here.device(other))
        access = torch.cuda.can_device_access_peer(one, other)
        rates_of_pairs[one, other] = access, _rate(received, sent, one, other)
        if not torch.equal(received.cpu(), source):
            raise RuntimeError(f"copies from device {one} to {other} bring wrong values")
        did(f"copies from device {one} to {other}")
    if rates_of_pairs:
        found(judge_pairs(rates_of_pairs))


def _seconds(run: Callable[[], object], times: int, *devices: int) -> float:
    """Seconds of a call that works on ``devices``, after one that is not counted."""
    here = current_platform()
    for count in (1, times):
        began = time.perf_counter()
        for _ in range(count):
            run()
        for index in devices:
            here.set_device(index)
            here.synchronize()
    return (time.perf_counter() - began) / times


def _rate(target: Tensor, source: Tensor, *devices: int) -> float:
    """Bytes a second from ``source`` to ``target``."""
    return source.nbytes / _seconds(lambda: target.copy_(source, non_blocking=True), _REPEATS, *devices)


def holders(uuid: str) -> list[str]:
    """Other processes with memory of a device, where NVIDIA's tool is there to tell them."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    words = [tool, "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader"]
    output = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS / 2, check=False).stdout
    rows = [line.split(", ", 3) for line in output.splitlines() if line.count(", ") >= 3]
    own = str(os.getpid())
    return [f"{name} (pid {pid}, {used})" for gpu, pid, used, name in rows if uuid in gpu and pid != own]


def judge_copies(index: int, rates: Mapping[str, tuple[float, float]]) -> Finding:
    """To the device and back, in bytes a second, by kind of the host's memory."""
    value = "; ".join(f"{kind} {there / 1e9:.2f}, back {back / 1e9:.2f}" for kind, (there, back) in rates.items())
    pageable, pinned = (min(rates.get(kind, (math.inf,))) for kind in ("pageable", "pinned"))
    rule = f"pinned memory at {LEAST_LINK / 1e9:g} GB/s, and no slower than pageable memory"
    remedy = "offloading is slow: nvidia-smi -q has the PCIe link's width, nvidia-smi topo -m the NUMA node to bind to"
    holds = pinned >= LEAST_LINK and (pinned >= pageable or "pinned" not in rates)
    return judge(f"device {index}: copies", f"{value} GB/s", rule, holds, remedy, data=dict(rates))


def judge_pairs(rates: Mapping[tuple[int, int], tuple[bool, float]]) -> Finding:
    """Peer access, and bytes a second, from one device to another."""
    apart = [f"{one} to {other}" for (one, other), (access, _) in rates.items() if not access]
    (one, other), (_, slowest) = min(rates.items(), key=lambda item: item[1][1])
    value = f"{len(rates) - len(apart)} of {len(rates)} pairs; slowest {one} to {other}, {slowest / 1e9:.2f} GB/s"
    value += f"; none from {', '.join(apart)}" if apart else ""
    off = os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0")
    rule = f"every device reaches the others, at {LEAST_LINK / 1e9:g} GB/s, and NCCL may use it"
    remedy = (
        "weight updates and collectives go through host memory: see nvidia-smi topo -m; a virtual machine, PCIe ACS "
        f"or an IOMMU forbids it{'; unset NCCL_P2P_DISABLE' if off else ''}"
    )
    data = {f"{one} to {other}": {"access": had, "rate": rate} for (one, other), (had, rate) in rates.items()}
    return judge("peer access", value, rule, not apart and not off and slowest >= LEAST_LINK, remedy, data=data)


# Arithmetic


def matrix(index_text: str) -> None:
    """A product that takes a while: on a small one a device waits for its commands."""
    import torch

    here, index = current_platform(), int(index_text)
    here.set_device(index)
    size, seconds = 256, 0.0
    while seconds < _PRODUCT_SECONDS and size < _LARGEST:
        size *= 2
        left, right = torch.randn(2, size, size, device=here.device(index), dtype=torch.bfloat16)
        multiply = partial(torch.matmul, left, right)
        seconds = _seconds(multiply, 1, index)
    _require("the matrix product", multiply()[:64, :64], left[:64].float() @ right[:, :64].float())
    rate = 2 * size**3 / _seconds(multiply, max(3, int(0.5 / seconds)), index)
    found(judge_product(index, here.device_name(index), rate, size))


def judge_product(index: int, name: str, rate: float, size: int) -> Finding:
    known = gpu_of(name)
    value = f"{rate / 1e12:.3g} TFLOP/s (bf16, {size} x {size})"
    rule = f"half of the {known.half / 1e12:g} TFLOP/s of {known.name}" if known else "the right values"
    holds = known is None or rate >= known.half / 2
    remedy = "look for another process, a power cap or heat (nvidia-smi -q -d PIDS,POWER,PERFORMANCE), or a PCIe card"
    data = {"flops_per_second": rate, "size": size}
    return judge(f"device {index}: matrix product", value, rule, holds, remedy, data=data)


def _require(what: str, result: Tensor, expected: Tensor) -> float:
    """The relative error of a result, which is small."""
    error = float((result.float() - expected).norm() / expected.norm())
    if not error <= TOLERANCE:  # NaN is an error too
        raise RuntimeError(f"{what} is wrong: relative error {error:.3g}")
    return error


def attention(index_text: str) -> None:
    """Attention of packed sequences as a trainer computes it, forward and backward, and the same by matrix products."""
    import torch

    from roll.models.attention import Scores, packed_attention
    from roll.models.patterns import PackedSequences

    here, index, lengths = current_platform(), int(index_text), (300, 1, 211)
    here.set_device(index)
    device, total = here.device(index), sum(lengths)
    counts = torch.tensor((0, *lengths), device=device)
    shapes = ((1, 8, total, 64), (1, 2, total, 64), (1, 2, total, 64), (1, total, 8, 64))
    *inputs, weights = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    plain = [tensor.detach().float().requires_grad_() for tensor in inputs]
    query, key, value = plain[0], *(tensor.repeat_interleave(4, 1) for tensor in plain[1:])
    owner = torch.arange(len(counts), device=device).repeat_interleave(counts)
    sees = (owner[:, None] == owner).tril()
    scores = (query @ key.transpose(2, 3) / 8).masked_fill(~sees, -math.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    expected.backward(weights.float())
    sequences = PackedSequences(lengths, counts.cumsum(0, dtype=torch.int32))
    output = packed_attention(inputs[0], inputs[1], inputs[2], sequences, Scores())
    output.backward(weights)
    pairs: list[tuple[Any, Any]] = [(output, expected)]
    pairs += [(one.grad, other.grad) for one, other in zip(inputs, plain, strict=True)]
    error = max(_require("attention", *pair) for pair in pairs)
    told = f"relative error {error:.4f} of outputs and gradients against float32"
    found(Finding(f"device {index}: attention", told, f"at most {TOLERANCE:.4f}", data={"error": error}))


# Weights


def hand_over(index_text: str) -> None:
    """Two buckets by the transport ``cuda_ipc`` to another process."""
    import torch

    from roll.weight_sync.device_transports import CudaIpcSender
    from roll.weight_sync.encoding import tensor_checksum

    current_platform().set_device(int(index_text))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_take, args=(theirs, index_text), daemon=True)
    process.start()
    theirs.close()
    sender = CudaIpcSender()
    for version in range(2):
        weights = {"large": torch.randn(16 << 20, device="cuda"), "scalar": torch.tensor(float(version), device="cuda")}
        sender.start([process], version, SECONDS)
        ours.send(sender.pack(weights))
        if (answer := ours.recv()) != {name: tensor_checksum(tensor) for name, tensor in weights.items()}:
            raise RuntimeError(answer if isinstance(answer, str) else "the other process reads wrong values")
        sender.release()
    ours.send(None)
    process.join()
    found(Finding(f"device {index_text}: cuda_ipc", "another process reads it", "the values that were sent"))


def _take(link: Connection, index_text: str) -> None:
    from roll.weight_sync.device_transports import CudaIpcSender
    from roll.weight_sync.encoding import tensor_checksum

    current_platform().set_device(int(index_text))
    receiver = CudaIpcSender.receiver()
    answer: object
    while (payload := link.recv()) is not None:
        try:
            answer = {name: tensor_checksum(tensor) for name, tensor in receiver.receive(payload).items()}
            receiver.settle()
        except Exception as error:  # which the sender tells
            answer = f"{type(error).__name__} in the other process: {error}"
        link.send(answer)
