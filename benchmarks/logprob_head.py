"""Time and memory of the log-prob head compared with the naive form (all logits, log_softmax, gather).

    python -m benchmarks.logprob_head                      # the tiny model's shape, then a large vocabulary
    python -m benchmarks.logprob_head --tokens 16384 --vocabulary 151936 --hidden 1536 --dtype bf16

Each row: CPU milliseconds (or device milliseconds on CUDA) of forward and backward, best of several, and the memory
that they take beyond inputs and gradients of the weights.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.measuring import clock, peak_bytes
from roll.models.log_probs import HeadMemory, token_log_probs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool) -> torch.Tensor:
    """All logits in float32 at once, as the formula is usually written."""
    table = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    total = table.gather(1, targets[:, None]).sum()
    return total - (table.exp() * table).sum() if entropy else total


def cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool) -> torch.Tensor:
    """All logits at once, through PyTorch's fused cross entropy; it has no entropies."""
    assert not entropy
    return -torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight).float(), targets).mul(
        len(targets)
    )


def chunked(keep: bool) -> Callable[..., torch.Tensor]:
    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool) -> torch.Tensor:
        memory = HeadMemory.for_device(hidden.device)
        memory = memory if keep else replace(memory, kept_bytes=0)
        log_probs, entropies, _ = token_log_probs(hidden, weight, targets, with_entropy=entropy, memory=memory)
        return log_probs.sum() if entropies is None else log_probs.sum() + entropies.sum()

    return run


METHODS: dict[str, Callable[..., torch.Tensor]] = {
    "naive": naive,
    "cross_entropy": cross_entropy,
    "roll": chunked(keep=True),
    "roll, nothing kept": chunked(keep=False),
}


def measure(method: str, args: argparse.Namespace) -> None:
    """Print one row. Run in a process of its own, so that peak memory is this method's alone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, device=device, dtype=DTYPES[args.dtype], requires_grad=True)
    weight = torch.randn(args.vocabulary, args.hidden, device=device, dtype=DTYPES[args.dtype], requires_grad=True)
    targets = torch.randint(0, args.vocabulary, (args.tokens,), device=device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    before = peak_bytes(device)
    best = float("inf")
    for _ in range(args.repeats):
        begin = clock(device)
        METHODS[method](hidden, weight, targets, args.entropy).backward()
        best = min(best, clock(device) - begin)
        gc.collect()
    print(f"{method:20s} {best * 1e3:10.1f} ms {(peak_bytes(device) - before) / 2**20:10.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="response tokens; without it two shapes are measured")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--method", choices=sorted(METHODS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.method:
        measure(args.method, args)
        return
    shapes = [(args.tokens, args.vocabulary)] if args.tokens else [(6912, 448), (1024, 151936)]
    for tokens, vocabulary in shapes:
        for entropy in (True,) if args.entropy else (False, True):
            print(f"\n{tokens} tokens, vocabulary {vocabulary}, {'with entropy' if entropy else 'log-probs only'}")
            shape = ["--tokens", str(tokens), "--vocabulary", str(vocabulary), "--hidden", str(args.hidden)]
            rest = ["--dtype", args.dtype, "--threads", str(args.threads)]
            rest += ["--repeats", str(args.repeats if vocabulary < 10_000 else 2)] + ["--entropy"] * entropy
            for method in METHODS:
                if not (entropy and method == "cross_entropy"):
                    subprocess.run(
                        [sys.executable, "-m", "benchmarks.logprob_head", *shape, *rest, "--method", method], check=True
                    )


if __name__ == "__main__":
    main()
