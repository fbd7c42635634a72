"""Peak memory and time of one MLP layer, forward and backward: whole, in tiles, and whole with gradient checkpointing.

    python -m benchmarks.tiled_mlp
    python -m benchmarks.tiled_mlp --tokens 32768 --hidden 2048 --intermediate 11008 --dtype bf16

Each row is measured in a process of its own: what the layer takes beyond its weights, their gradients, its input and
that one's gradient.  On CUDA the device's peak, else the process's, with an allocator that gives back what is freed.
Time is CPU time, on CUDA that of the clock.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.measuring import clock, peak_bytes
from roll.models.build import tile_mlp_layers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WHOLE, CHECKPOINTED = 0, -1


def build_layer(args: argparse.Namespace, tiles: int) -> torch.nn.Module:
    config = Qwen2Config(
        vocab_size=8,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config).to(DTYPES[args.dtype])
    if tiles > 0:
        tile_mlp_layers(model, tiles)
    return model.model.layers[0].mlp


def measure(args: argparse.Namespace, tiles: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    layer = build_layer(args, tiles).to(device)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    hidden = torch.randn(1, args.tokens, args.hidden, device=device, dtype=DTYPES[args.dtype], requires_grad=True)
    hidden.grad = torch.zeros_like(hidden)
    upstream = torch.randn_like(hidden)
    before, begin = peak_bytes(device), clock(device)
    output = checkpoint(layer, hidden, use_reentrant=False) if tiles == CHECKPOINTED else layer(hidden)
    output.backward(upstream)
    seconds, peak = clock(device) - begin, peak_bytes(device)
    name = {WHOLE: "whole", CHECKPOINTED: "whole, gradient checkpointing"}.get(tiles, f"{tiles} tiles")
    print(f"{name:32s} {(peak - before) / 2**20:10.0f} MiB {seconds * 1e3:10.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiles", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiles is not None:
        measure(args, args.tiles)
        return
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for tiles in (WHOLE, CHECKPOINTED, 4, 16):
        subprocess.run(
            [sys.executable, "-m", "benchmarks.tiled_mlp", *sys.argv[1:], f"--tiles={tiles}"], check=True, env=environ
        )


if __name__ == "__main__":
    main()
