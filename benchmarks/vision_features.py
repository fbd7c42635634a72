"""Forward and backward pass of a group's samples, which all speak of one image: the vision tower for each row, or once.

    python -m benchmarks.vision_features
    python -m benchmarks.vision_features --group 16 --pixels 448 --threads 4

The model is a Qwen3-VL with random weights whose tower has a third of all weights. ``transformers`` is its own forward
pass, in which every row brings its image; the others go through the layouts of the training strategies.  Contestants
take turns; the fastest round counts.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.measuring import clock
from roll.models.layout_setup import use_layout_attention
from roll.models.layouts import on_device, packed_layout, row_layout, tree_layout
from roll.models.log_probs import ResponseModel
from roll.models.vision import PROMPT_KEYS, with_images
from roll.protocol.images import EncodedImage, ImageProcessing
from roll.protocol.vision import IMAGES, token_types, vision_inputs

IMAGE, VIDEO, START, END = 1, 2, 3, 4
VOCABULARY = 8192
PROMPT_TEXT = 32
PROCESSING = ImageProcessing(patch_size=16)


def build_model(device: torch.device) -> Any:
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 384,
        "intermediate_size": 1152,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 48,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 8, 8],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 6,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_heads": 8,
        "patch_size": PROCESSING.patch_size,
        "out_hidden_size": 384,
        "num_position_embeddings": 1024,
        "deepstack_visual_indexes": [1, 3],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config).to(device)


def make_batch(args: argparse.Namespace, one_image: bool) -> dict[str, Any]:
    """Rows behind one prompt; without ``one_image`` each row's picture is another one, of the same size."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(args.group):
        file = io.BytesIO()
        pixels = random.integers(0, 255, (args.pixels, args.pixels, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "PNG")
        rows.append(vision_inputs([EncodedImage.of(file.getvalue())], PROCESSING))
    images = np.empty(args.group, dtype=object)
    images[:] = [rows[0]] * args.group if one_image else rows
    prompt = torch.tensor([START, *[IMAGE] * rows[0].num_tokens[0], END, *range(5, 5 + PROMPT_TEXT)])
    answers = torch.from_numpy(random.integers(100, VOCABULARY, (args.group, args.response)))
    ids = torch.cat([prompt.expand(args.group, -1), answers], 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "response_mask": (torch.arange(ids.shape[1]) >= len(prompt)).expand_as(ids),
        IMAGES: images,
    }


def of_transformers(model: Any, batch: dict[str, Any], device: torch.device) -> Callable[[], torch.Tensor]:
    ids = batch["input_ids"].to(device)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.cat([row.pixel_values() for row in batch[IMAGES]]).to(device),
        "image_grid_thw": torch.cat([row.grids() for row in batch[IMAGES]]).to(device),
        "mm_token_type_ids": token_types(ids, model.config),
    }
    first = int(batch["response_mask"][0].int().argmax())

    def loss() -> torch.Tensor:
        logits = model(**inputs, logits_to_keep=ids.shape[1] - first + 1).logits[:, :-1].float()
        return -logits.log_softmax(-1).gather(2, ids[:, first:, None]).mean()

    return loss


def of_layout(model: Any, batch: dict[str, Any], device: torch.device, name: str) -> Callable[[], torch.Tensor]:
    columns, pool = with_images(batch, model.config)
    assert pool is not None
    ids, mask = columns["input_ids"], columns["response_mask"]
    lay_out = {
        "rows": lambda: row_layout(ids, mask),
        "shared prompts": lambda: tree_layout(ids, mask, packed_layout, columns[PROMPT_KEYS]),
    }[name]
    layout = on_device(pool.attach(lay_out(), columns), device)
    response_model = ResponseModel(model)
    return lambda: -response_model(layout, ("log_probs",))["log_probs"].mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=320)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own, other = build_model(device), build_model(device)
    use_layout_attention(other, "use_prefix_sharing")
    each, one = (make_batch(args, one_image) for one_image in (False, True))
    contestants: dict[str, tuple[Any, Callable[[], torch.Tensor]]] = {
        "transformers, the tower for each row": (own, of_transformers(own, one, device)),
        "here, rows with images of their own": (other, of_layout(other, each, device, "rows")),
        "here, one image": (other, of_layout(other, one, device, "rows")),
        "here, one image, shared prompt": (other, of_layout(other, one, device, "shared prompts")),
    }
    tower = sum(parameter.numel() for parameter in own.model.visual.parameters())
    total = sum(parameter.numel() for parameter in own.parameters())
    tokens = one["input_ids"].shape[1]
    print(
        f"{total / 1e6:.1f}M weights, {tower / 1e6:.1f}M of them in the tower; {args.group} rows of {tokens} tokens, "
    )
    print(f"{one[IMAGES][0].num_patches} patches, {one[IMAGES][0].num_tokens[0]} tokens an image; {device.type}\n")
    for frozen in (False, True):
        for model in (own, other):
            model.model.visual.requires_grad_(not frozen)
        best: dict[str, float] = {}
        for _ in range(args.rounds):
            for name, (model, loss) in contestants.items():
                model.zero_grad()
                begin = clock(device)
                loss().backward()
                best[name] = min(best.get(name, float("inf")), clock(device) - begin)
        print(f"| {'frozen tower' if frozen else 'trained tower'} | ms | |\n|---|---|---|")
        first = next(iter(best.values()))
        for name, seconds in best.items():
            print(f"| {name} | {seconds * 1e3:,.0f} | {first / seconds:.2f} |")
        print()


if __name__ == "__main__":
    main()
