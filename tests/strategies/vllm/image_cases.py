"""Images through vLLM, in the engine's process, and through ``hf_infer`` and a plain forward pass, in the test's."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from roll.strategies.engines.requests import GenerationRequest, SamplingParams


def requests(tokenizer: Any, version: int) -> list[GenerationRequest]:
    """Greedy and sampled, for prompts of one image, two, none, and one of another size."""
    from tests import vision_models

    prompts = [
        vision_models.prompt(tokenizer, 1),
        vision_models.prompt(tokenizer, 2, num_images=2),
        vision_models.prompt(tokenizer, 3, num_images=0),
        vision_models.prompt(tokenizer, 4, size=(90, 50)),
    ]
    made = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(14, temperature=temperature, seed=3)
        for i, one in enumerate(prompts):
            made.append(GenerationRequest(f"{version} {i} {temperature}", one.token_ids, params, 2, vision=one.vision))
    return made


def make_models(folder: Path, kind: Any) -> None:
    """Two models, the second of which is what an update brings; both like the placeholders."""
    from roll.protocol.vision import vision_token_ids
    from tests import vision_models
    from tests.strategies.engine_models import jolt

    words = vision_models.tokenizer()
    model = vision_models.model(words, kind, hidden=128).requires_grad_(False)
    for version in range(2):
        model.lm_head.weight[list(vision_token_ids(model.config))] *= 3
        vision_models.tiny_vl_model.save(model, words, folder / str(version))
        _write_as_published(model, folder / str(version))
        jolt(model, 1)


def _write_as_published(model: Any, folder: Path) -> None:
    """transformers writes the experts of a new model as it computes with them; the hub has them transposed."""
    from safetensors.torch import save_file

    from roll.models.stored import StoredLayout

    views = StoredLayout(model).views(dict(model.named_parameters()))
    save_file(
        {name: tensor.contiguous() for name, tensor in views.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def generated(folder: Path, torchvision: str) -> dict[str, Any]:
    """Outputs of both models' requests from one engine, updated in between; ``torchvision``: its folder."""
    assert "transformers" not in sys.modules, "it looks for torchvision when it is imported"
    sys.path.append(torchvision)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), torchvision)))
    from tests.strategies.engine_cases import engine, update
    from tests.strategies.hf_infer.helpers import run

    with engine(folder / "0", "vllm", max_num_batched_tokens=160, max_model_len=160) as started:
        from transformers import AutoModelForImageTextToText

        from tests import vision_models

        words = vision_models.tokenizer()
        outputs = run(started, requests(words, 0))
        model = AutoModelForImageTextToText.from_pretrained(folder / "1", dtype=torch.float32).requires_grad_(False)
        wrong = update(started, model, 1)
        outputs |= run(started, requests(words, 1))
        first = requests(words, 1)[0]
        try:
            started.add_requests([replace(first, request_id="r", prompt_token_ids=_without_one(first, model))])
            refused = ""
        except ValueError as error:
            refused = str(error)
    return {"outputs": outputs, "wrong": wrong, "refused": refused}


def _without_one(request: GenerationRequest, model: Any) -> list[int]:
    token_ids = list(request.prompt_token_ids)
    token_ids.remove(model.config.image_token_id)
    return token_ids


def compared(folder: Path, found: dict[str, Any]) -> tuple[list[float], int]:
    """Distances to the log-probs of a forward pass, by sample, and how many greedy samples ``hf_infer`` has as well."""
    from transformers import AutoModelForImageTextToText

    from tests import vision_models
    from tests.strategies.hf_infer.helpers import run
    from tests.strategies.hf_infer.test_images import build_engine, forward

    words = vision_models.tokenizer()
    gaps, same = [], 0
    for version in range(2):
        model = AutoModelForImageTextToText.from_pretrained(folder / str(version), dtype=torch.float32).eval()
        model.requires_grad_(False)
        asked = {one.request_id: one for one in requests(words, version)}
        embedded = run(build_engine(model, max_num_seqs=16), list(asked.values()))
        for (name, index), output in found["outputs"].items():
            if name not in asked:
                continue
            one = asked[name]
            prompt = vision_models.VisionPrompt(list(one.prompt_token_ids), one.vision)
            expected = forward(model, prompt, output.token_ids).gather(1, torch.tensor(output.token_ids)[:, None])
            gaps.append(float((expected[:, 0] - torch.tensor(output.log_probs)).abs().max()))
            # vLLM's ends with the tokenizer's end token.
            other = embedded[name, index].token_ids[: len(output.token_ids)]
            same += name.endswith(" 0.0") and other == output.token_ids
    return gaps, same
