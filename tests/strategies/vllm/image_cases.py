"""Images and videos through vLLM, in the engine's process, and through ``hf_infer`` and a plain forward pass, in the
test's."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams

BEGUN = 2  # tokens that samples come with which another engine has begun


def requests(tokenizer: Any, kind: Any, version: int) -> list[GenerationRequest]:
    """Greedy and sampled, for prompts of one image, two, none, and one of another size; of a video, one of other
    frames, an image between two videos, and one whose grids are a time apart that is no integer."""
    from tests import vision_models

    prompts = [
        vision_models.prompt(tokenizer, 1),
        vision_models.prompt(tokenizer, 2, num_images=2),
        vision_models.prompt(tokenizer, 3, num_images=0),
        vision_models.prompt(tokenizer, 4, size=(90, 50)),
        vision_models.video_prompt(tokenizer, kind, 0, fps=8.0),
        vision_models.video_prompt(tokenizer, kind, 5, fps=8.0),
        vision_models.video_prompt(tokenizer, kind, 1, (2, 3), fps=8.0, image=1),
        vision_models.video_prompt(tokenizer, kind, 3, (5,), fps=6.0),
    ]
    made = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(14, temperature=temperature, seed=3)
        for i, one in enumerate(prompts):
            made.append(GenerationRequest(f"{version} {i} {temperature}", one.token_ids, params, 2, vision=one.vision))
    return made


def long_video(tokenizer: Any, kind: Any) -> GenerationRequest:
    """A video whose seconds reach further than its rows and columns."""
    from tests import vision_models

    prompt = vision_models.video_prompt(tokenizer, kind, 3, (6,), fps=2.0)
    params = SamplingParams(14, temperature=0.0)
    return GenerationRequest("long", prompt.token_ids, params, 1, vision=prompt.vision)


def begun_request(tokenizer: Any, kind: Any) -> GenerationRequest:
    """Both samples have a beginning by another engine, and this one has not seen the video."""
    *_, last = [one for one in requests(tokenizer, kind, 0) if one.params.temperature == 0]
    ids = tokenizer("How many red")["input_ids"][:BEGUN]
    begun = [GenerationOutput("begun", index, ids, [-1.0] * BEGUN, "abort", [(0, 0, BEGUN)]) for index in range(2)]
    return replace(last, request_id="begun", partial=dict(enumerate(begun)))


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


def with_torchvision(folder: str) -> None:
    """Let this process and those that it starts import torchvision from ``folder``."""
    assert "transformers" not in sys.modules, "it looks for torchvision when it is imported"
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), folder)))


def generated(folder: Path, kind: Any, torchvision: str) -> dict[str, Any]:
    """Outputs of both models' requests from one engine, updated in between; ``torchvision``: its folder."""
    with_torchvision(torchvision)
    from tests.strategies.engine_cases import engine, message, update
    from tests.strategies.hf_infer.helpers import run

    with engine(folder / "0", "vllm", max_num_batched_tokens=160, max_model_len=160) as started:
        from transformers import AutoModelForImageTextToText

        from tests import vision_models

        words = vision_models.tokenizer()
        continued = run(started, [begun_request(words, kind)])
        outputs = run(started, requests(words, kind, 0))
        model = AutoModelForImageTextToText.from_pretrained(folder / "1", dtype=torch.float32).requires_grad_(False)
        wrong = update(started, model, 1)
        outputs |= run(started, requests(words, kind, 1))
        first = requests(words, kind, 1)[0]
        cut = list(first.prompt_token_ids)
        cut.remove(model.config.image_token_id)
        refused = message(lambda: started.add_requests([replace(first, request_id="r", prompt_token_ids=cut)]))
        placed = message(lambda: outputs.update(run(started, [long_video(words, kind)])))
    return {"outputs": outputs, "continued": continued, "wrong": wrong, "refused": refused, "placed": placed}


def placed(folder: Path, torchvision: str) -> list[tuple[tuple[Any, ...], bool, bool]]:
    """(dtype, frames, rate, size) of videos; true where vLLM's positions of the prompt are those of transformers; true
    where they are said to be."""
    with_torchvision(torchvision)
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from vllm.config import ModelConfig
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from roll.protocol.images import EngineTime
    from roll.protocol.vision import vision_inputs
    from roll.strategies.vllm.arguments import ImagePrompts
    from tests import vision_models
    from tests.strategies.vision_cases import vision_keywords

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    words, config = AutoTokenizer.from_pretrained(folder), model.config
    opened, closed = ([one] for one in (config.vision_start_token_id, config.vision_end_token_id))
    family: Any = Qwen2_5_VLForConditionalGeneration
    bare = SimpleNamespace(config=config)  # no weights
    bare.iter_mm_grid_thw = partial(family.iter_mm_grid_thw, bare)
    taken = replace(vision_models.video_processing("qwen2_5_vl"), fps=100.0)  # every frame
    found = []
    for dtype in ("float32", "bfloat16", "float16"):
        processor = MULTIMODAL_REGISTRY.create_processor(ModelConfig(str(folder), dtype=dtype))  # type: ignore[arg-type]
        prompts = ImagePrompts(config, words, dtype)
        time = EngineTime(config.vision_config.tokens_per_second, dtype)
        for case in product((2, 5, 8, 16), (1.0, 7.0, 8.0, 9.6, 12.0, 23.0, 24.0, 60.0), (None, (160, 16))):
            count, rate, size = case
            video = taken.encoded(vision_models.frames(0, count, size), rate, vision_models.PROCESSING)
            vision = vision_inputs([video], vision_models.PROCESSING)
            ids = [*opened, *[config.video_token_id] * sum(vision.num_tokens), *closed, *words("How many")["input_ids"]]
            given: Any = prompts.prompt(ids, vision)
            items = processor.info.parse_mm_data(given["multi_modal_data"])
            made = processor(given["prompt_token_ids"], items, hf_processor_mm_kwargs=given["mm_processor_kwargs"])
            assert list(made["prompt_token_ids"]) == ids
            features = [
                SimpleNamespace(modality="video", data=item, mm_position=place)
                for item, place in zip(made["mm_kwargs"]["video"], made["mm_placeholders"]["video"], strict=True)
            ]
            theirs, _ = family.get_mrope_input_positions(bare, ids, features)
            inputs = vision_keywords([vision], torch.tensor([ids]), config)
            del inputs["pixel_values_videos"]
            ours, _ = model.model.get_rope_index(torch.tensor([ids]), **inputs)
            same = torch.equal(ours[:, 0], theirs)
            found.append(((dtype, *case), same, time.difference(video, vision_models.PROCESSING) is None))
    return found


def compared(folder: Path, kind: Any, found: dict[str, Any]) -> tuple[list[float], int]:
    """Distances to the log-probs of a forward pass, by sample, and how many greedy samples ``hf_infer`` has as well."""
    from transformers import AutoModelForImageTextToText

    from tests import vision_models
    from tests.strategies.hf_infer.helpers import run
    from tests.strategies.hf_infer.images import build_engine, forward

    words = vision_models.tokenizer()
    gaps, same = [], 0
    for version in range(2):
        model = AutoModelForImageTextToText.from_pretrained(folder / str(version), dtype=torch.float32).eval()
        model.requires_grad_(False)
        asked = {one.request_id: one for one in requests(words, kind, version)}
        embedded = run(build_engine(model, max_num_seqs=16), list(asked.values()))
        sampled = [(asked[name], 0, output) for (name, _), output in found["outputs"].items() if name in asked]
        if version == 0:
            begun = begun_request(words, kind)
            sampled += [(begun, BEGUN, output) for output in found["continued"].values()]
        for one, start, output in sampled:
            prompt = vision_models.VisionPrompt(list(one.prompt_token_ids), one.vision)
            expected = forward(model, prompt, output.token_ids).gather(1, torch.tensor(output.token_ids)[:, None])
            gaps.append(float((expected[:, 0] - torch.tensor(output.log_probs))[start:].abs().max()))
            # vLLM's ends with the tokenizer's end token.
            if start == 0 and one.params.temperature == 0:
                same += (
                    embedded[one.request_id, output.sample_index].token_ids[: len(output.token_ids)] == output.token_ids
                )
    return gaps, same
