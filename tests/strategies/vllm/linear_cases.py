"""Linear attention through vLLM, in the engine's process, next to transformers in two types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from tests.strategies.vllm.image_cases import with_torchvision

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 64,  # vLLM has no kernels for smaller ones
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rms_norm_eps": 1e-6,
}
WIDTHS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def write(folder: Path, family: str) -> None:
    from tests.strategies.hf_infer.helpers import make_tokenizer
    from tests.strategies.moe_models import write_moe
    from tests.strategies.published_models import PUBLISHED, write_published

    sizes = SIZES | ({} if family == PUBLISHED[0] else WIDTHS)
    (write_published if family in PUBLISHED else write_moe)(folder, family, **sizes)
    make_tokenizer().save_pretrained(folder)


def after_updates(folder: Path, torchvision: str, ranks: int) -> list[tuple[list[str], list[float], list[float]]]:
    """After 0, 1 and 2 updates of all weights as they travel: names found wrong; and by token how far the log-probs of
    vLLM, and those of transformers in the same type, are from the model's in float32."""
    with_torchvision(torchvision)
    from tests.strategies.engine_cases import engine, update
    from tests.strategies.engine_models import jolt, load
    from tests.strategies.hf_infer import helpers

    found = []
    with engine(folder, "vllm", "bf16", tensor_parallel_size=ranks) as started:
        rounded = load(folder, "bf16")
        for version in range(3):
            if version:
                jolt(rounded, version)
            wrong = update(started, rounded, version) if version else []
            prompts = helpers.random_prompts([3, 17, 40, 65], seed=version)
            params = SamplingParams(24, seed=version)
            requests = [GenerationRequest(f"{version}.{i}", prompt, params, 2) for i, prompt in enumerate(prompts)]
            outputs = helpers.run(started, requests)
            exact = load(folder)
            exact.load_state_dict(rounded.float().state_dict())
            rounded = rounded.bfloat16()
            theirs: list[float] = []
            own: list[float] = []
            for (name, _), output in outputs.items():
                prompt = prompts[int(name.partition(".")[2])]
                wanted, near = (log_probs(model, prompt, output.token_ids) for model in (exact, rounded))
                theirs += (torch.tensor(output.log_probs) - wanted).abs().tolist()
                own += (near - wanted).abs().tolist()
            found.append((wrong, theirs, own))
    return found


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def refusal(folder: Path) -> str:
    """Of a type that vLLM's kernel does not compute in."""
    from tests.strategies.engine_cases import message, start

    return message(lambda: start(folder, "vllm", "fp32"))
