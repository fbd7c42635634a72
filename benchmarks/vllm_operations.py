"""How far each operation of vLLM is from the trainer's, for equal inputs, and whether it depends on the batch.

    python -m benchmarks.vllm_operations --model FOLDER [--dtype float32] [--tokens 64]

vLLM prefills one prompt.  The inputs that each operation of each layer got are given to the same operation of
transformers' model as the trainers run it (products by oneDNN, attention by ``scaled_dot_product_attention``), so a
difference is that operation's own and not inherited from an earlier layer.  ``rows alone`` gives vLLM's operation
the tokens one at a time: if the result differs, a log-prob depends on what else is in the batch.  The last row compares
the final hidden state of a decoded token with that of the same token in a prefill.  Shares are of elements that differ
in any bit; the largest difference is relative to the largest output.

Needs ``pip install -e '.[vllm]'`` and a dense model of the Llama architecture; SmolLM2 was measured.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model must be in this process

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from vllm import LLM, SamplingParams

from roll.models.kernels import use_products

PARTS = (
    "input_layernorm",
    "self_attn.qkv_proj",
    "self_attn.rotary_emb",
    "self_attn.attn",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_up_proj",
    "mlp.act_fn",
    "mlp.down_proj",
)
Tensors = tuple[Tensor, ...]


def tensors(values: Any) -> Tensors:
    """Copies of the tensors among an operation's arguments or results: vLLM writes over some."""
    items = values if isinstance(values, tuple) else (values,)
    return tuple(item.detach().clone() for item in items if isinstance(item, Tensor))


Calls = dict[str, tuple[Tensors, Tensors]]


def recorded(engine: LLM, names: list[str], ids: list[int], decoded: int = 0) -> tuple[Any, Calls, list[int]]:
    """vLLM's model, inputs and outputs of its modules ``names`` in the last pass over ``ids`` and ``decoded`` greedy
    tokens, and these tokens."""
    inputs: dict[str, Tensors] = {}
    calls: Calls = {}

    def before(name: str) -> Callable[..., None]:
        return lambda _, arguments: inputs.update({name: tensors(arguments)})

    def after(name: str) -> Callable[..., None]:
        return lambda _, arguments, results: calls.update({name: (inputs[name], tensors(results))})

    model = engine.apply_model(lambda model: model)[0]
    modules = dict(model.named_modules(remove_duplicate=False))  # the layers may share one table of angles
    handles: list[Any] = []
    for name in names:
        handles += [modules[name].register_forward_pre_hook(before(name))]
        handles += [modules[name].register_forward_hook(after(name))]
    settings = SamplingParams(temperature=0.0, max_tokens=1 + decoded, ignore_eos=True)
    (request,) = engine.generate({"prompt_token_ids": ids}, settings, use_tqdm=False)
    for handle in handles:
        handle.remove()
    return model, calls, list(request.outputs[0].token_ids)


def by_trainer(model: Any, name: str, inputs: Tensors) -> Tensors:
    """The same operation by transformers' modules; ``name`` as in vLLM, inputs (tokens, size)."""
    parent, _, last = name.rpartition(".")
    owner = model.get_submodule(parent)
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if last in ("input_layernorm", "post_attention_layernorm", "norm"):
        total = sum(inputs[1:], inputs[0])
        return (getattr(owner, last)(total[None])[0], total)[: len(inputs)]
    if last == "qkv_proj":
        return (torch.cat([getattr(owner, part)(inputs[0][None])[0] for part in ("q_proj", "k_proj", "v_proj")], -1),)
    if last == "gate_up_proj":
        return (torch.cat([getattr(owner, part)(inputs[0][None])[0] for part in ("gate_proj", "up_proj")], -1),)
    if last == "act_fn":
        gate, up = inputs[0].chunk(2, -1)
        return (owner.act_fn(gate) * up,)
    heads = [item.view(1, len(item), -1, head).transpose(1, 2) for item in inputs if item.is_floating_point()]
    if last == "rotary_emb":
        turned = apply_rotary_pos_emb(*heads, *model.model.rotary_emb(heads[0], inputs[0][None]))
        return tuple(item.transpose(1, 2).flatten(2)[0] for item in turned)
    if last == "attn":
        found = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return (found.transpose(1, 2).flatten(2)[0],)
    return (getattr(owner, last)(inputs[0][None])[0],)


def alone(module: Any, inputs: Tensors) -> Tensors:
    """vLLM's operation on one token at a time."""
    rows = [tensors(module(*(item[row : row + 1].clone() for item in inputs))) for row in range(len(inputs[0]))]
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def difference(found: Tensors, expected: Tensors) -> tuple[float, float]:
    """Share of numbers that differ, and the largest difference relative to the largest number."""
    one, other = (torch.cat([item.flatten().float() for item in items]) for items in (found, expected))
    return float((one != other).float().mean()), float((one - other).abs().max() / other.abs().max())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    trainer = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    use_products(trainer)
    engine = LLM(
        options.model,
        dtype=options.dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=options.tokens + 2,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.1,
    )
    ids = torch.randint(5, trainer.config.vocab_size, (options.tokens,), generator=torch.Generator().manual_seed(0))
    layers = range(trainer.config.num_hidden_layers)
    names = [f"model.layers.{layer}.{part}" for layer in layers for part in PARTS] + ["model.norm"]
    model, calls, (following, *_) = recorded(engine, names, ids.tolist())
    hidden = calls["model.norm"][1][:1]
    logits = (model.compute_logits(hidden[0]),)
    shares: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for name, (inputs, outputs) in calls.items():
        *_, part = name.split(".", 3)
        isolated = (0.0, 0.0)
        if not name.endswith(".attn"):
            isolated = difference(alone(model.get_submodule(name), inputs), outputs)
        shares[part].append((*difference(outputs, by_trainer(trainer, name, inputs)), *isolated))
    rows = (torch.cat([model.compute_logits(row) for row in hidden[0].split(1)]),)
    shares["lm_head"].append((*difference(logits, by_trainer(trainer, "lm_head", hidden)), *difference(rows, logits)))
    decoding = recorded(engine, ["model.norm"], ids.tolist(), decoded=1)[1]["model.norm"][1][:1]
    prefill = recorded(engine, ["model.norm"], [*ids.tolist(), following])[1]["model.norm"][1][:1]
    table = Table("operation", "unlike the trainer's", "by at most", "unlike its rows alone", "by at most")
    for part, figures in shares.items():
        share, most, lonely, lonely_most = (column.tolist() for column in torch.tensor(figures).T)
        means = [sum(share) / len(share), max(most), sum(lonely) / len(lonely), max(lonely_most)]
        table.add_row(part, f"{means[0]:.1%}", f"{means[1]:.1e}", f"{means[2]:.1%}", f"{means[3]:.1e}")
    share, most = difference(decoding, (prefill[0][-1:],))
    table.add_row("decoding, unlike prefill", "", "", f"{share:.1%}", f"{most:.1e}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
