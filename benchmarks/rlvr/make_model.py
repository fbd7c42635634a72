"""An untrained model of about 10M parameters with the tiny example's tokenizer: what the harness's ``--model`` takes.

python benchmarks/rlvr/make_model.py TINY_MODEL OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SHAPE = {"hidden_size": 320, "num_hidden_layers": 8, "num_attention_heads": 5, "num_key_value_heads": 5}


def main(tiny: Path, output: Path) -> None:
    config = AutoConfig.from_pretrained(tiny)
    config.update(SHAPE | {"intermediate_size": 864, "head_dim": 64, "initializer_range": 0.02, "layer_types": None})
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(output)
    print(f"{model.num_parameters() / 1e6:.1f}M parameters in {output}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
