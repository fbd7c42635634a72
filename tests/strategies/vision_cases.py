"""Batches with images, and the plain vision-language model on them: what every strategy must equal."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.protocol.images import EncodedVideo
from roll.protocol.vision import IMAGES, VisionInputs, patches_of, token_types, vision_token_ids
from roll.strategies.base import Output, StateKind, WeightSelection
from tests import vision_models
from tests.strategies.samples import TensorBatch, policy_loss
from tests.vision_models import VisionPrompt

GROUP_SIZE = 3


@cache
def prompts() -> tuple[VisionPrompt, ...]:
    """One image, two, one of another size, and text; the first two are the same in ids but for their images."""
    tokenizer = vision_models.tokenizer()
    first = vision_models.prompt(tokenizer, 0)
    twin = VisionPrompt(first.token_ids, vision_models.prompt(tokenizer, 5).vision)
    wide = vision_models.prompt(tokenizer, 2, size=(64, 32))
    return first, twin, vision_models.prompt(tokenizer, 1, num_images=2), wide, vision_models.prompt(tokenizer, 3, 0)


@cache
def video_prompts(kind: Any) -> tuple[VisionPrompt, ...]:
    """A video, a twin of other frames, an image between two videos, one that is long in time, and text."""
    tokenizer = vision_models.tokenizer()
    first = vision_models.video_prompt(tokenizer, kind, 0)
    twin = VisionPrompt(first.token_ids, vision_models.video_prompt(tokenizer, kind, 5).vision)
    mixed = vision_models.video_prompt(tokenizer, kind, 1, (2, 3), image=1)
    long = vision_models.video_prompt(tokenizer, kind, 3, (6,), fps=0.25)
    return first, twin, mixed, long, vision_models.prompt(tokenizer, 3, 0)


def make_batch(
    which: tuple[int, ...] = (0, 1, 2, 3, 4), group_size: int = GROUP_SIZE, videos: str | None = None
) -> dict[str, Any]:
    """``group_size`` rows behind each prompt, of different lengths; the second row has no response.

    Args:
        videos: kind of the model for which the prompts are those with videos.
    """
    random = torch.Generator().manual_seed(0)
    chosen = [(prompts() if videos is None else video_prompts(videos))[index] for index in which]
    rows: list[tuple[VisionPrompt, list[int]]] = []
    for prompt in chosen:
        for _ in range(group_size):
            length = int(torch.randint(2, 7, (1,), generator=random))
            # Letters: the first ids are special tokens, of which a policy cannot sample all.
            rows.append((prompt, torch.randint(16, 200, (length,), generator=random).tolist()))
    batch = assembled(rows)
    if len(rows) > 1:
        batch["response_mask"][1] = False
    response = batch["response_mask"]
    batch["advantages"] = torch.randn(len(rows), 1, generator=random) * response
    batch["num_tokens"] = response.sum().expand(len(rows))
    return batch


def assembled(rows: list[tuple[VisionPrompt, list[int]]]) -> dict[str, Any]:
    """Prompts and responses as a right-padded batch."""
    width = max(len(prompt.token_ids) + len(answer) for prompt, answer in rows) + 2
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    attention, response = (torch.zeros(len(rows), width, dtype=torch.bool) for _ in range(2))
    for row, (prompt, answer) in enumerate(rows):
        start, end = len(prompt.token_ids), len(prompt.token_ids) + len(answer)
        ids[row, :end] = torch.tensor(prompt.token_ids + answer)
        attention[row, :end] = True
        response[row, start:end] = True
    images = np.empty(len(rows), dtype=object)
    images[:] = [prompt.vision for prompt, _ in rows]
    return {"input_ids": ids, "attention_mask": attention, "response_mask": response, IMAGES: images}


def split(batch: dict[str, Any], sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    bounds = list(accumulate(sizes, initial=0))
    assert bounds[-1] == len(batch["input_ids"])
    return [{name: column[start:stop] for name, column in batch.items()} for start, stop in pairwise(bounds)]


def plain_model(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def plain_inputs(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The keywords of the model's own forward pass: every row with its own copy of its images."""
    seen: list[VisionInputs] = [row for row in batch[IMAGES] if row is not None]
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].long()}
    return inputs | vision_keywords(seen, batch["input_ids"], model.config)


def vision_keywords(seen: list[VisionInputs], input_ids: torch.Tensor, config: Any) -> dict[str, Any]:
    """The keywords of a model's own forward pass for the images and videos of all rows."""
    if not seen:
        return {}
    inputs: dict[str, Any] = {"mm_token_type_ids": token_types(input_ids, config)}
    for is_video, patches, grids in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        own = [
            (patches_of(one, row.processing), grid)
            for row in seen
            for one, grid in zip(row.images, row.grids(), strict=True)
            if isinstance(one, EncodedVideo) == is_video
        ]
        if own:
            inputs[patches] = torch.cat([one for one, _ in own])
            inputs[grids] = torch.stack([grid for _, grid in own])
    if config.model_type == "qwen2_5_vl" and "video_grid_thw" in inputs:
        videos = [(video, row) for row in seen for video in row.videos]
        inputs["second_per_grid_ts"] = [video.seconds_per_grid(row.processing) for video, row in videos]
    return inputs


def plain_outputs(model: Any, batch: dict[str, Any]) -> TensorBatch:
    """Log-probs, entropies and sums of squares by the book: padded, masked, all logits, a tower for every row."""
    logits = model(**plain_inputs(model, batch)).logits[:, :-1]
    logits = logits.index_fill(2, torch.tensor(vision_token_ids(model.config)), -1e30)
    table = logits.log_softmax(-1)
    mask, pad = batch["response_mask"], torch.nn.functional.pad

    def aligned(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, pad(values, (1, 0)), 0.0)

    return {
        "log_probs": aligned(table.gather(2, batch["input_ids"][:, 1:, None])[..., 0]),
        "entropy": aligned(-(table.exp() * table).sum(-1)),
        "sum_of_squares": aligned(table.exp().square().sum(-1)),
    }


def plain_results(folder: Path, batch: dict[str, Any], frozen: str | None = None) -> dict[str, Any]:
    """The plain model on the whole batch: outputs, gradients, norm, and what float32 rounds the gradients by."""

    def computed(dtype: torch.dtype) -> tuple[TensorBatch, dict[str, torch.Tensor]]:
        model = plain_model(folder).to(dtype)
        if dtype is torch.float64 and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # grouped products have no float64
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen is None or not name.startswith(frozen))
        outputs = plain_outputs(model, batch)
        policy_loss(outputs, batch)[0].backward()
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        # A batch of text alone leaves the tower without gradients.
        return outputs, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}

    outputs, gradients = computed(torch.float32)
    _, exact = computed(torch.float64)
    return {
        "outputs": {name: values.detach() for name, values in outputs.items()},
        "gradients": gradients,
        "norm": float(torch.nn.utils.get_total_norm(list(gradients.values()))),
        "rounding": {name: float((gradient - exact[name]).abs().max()) for name, gradient in gradients.items()},
    }


def facts_of_freezing(role: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """After a step: gradients and elements of optimizer states of this rank, weights that changed, and what is sent."""
    from tests.strategies import jobs

    strategy = jobs.started(role, 10)
    named = dict(strategy.model.language_model.named_parameters())
    before = jobs.weights_of(strategy)
    step = strategy._clip_and_step
    gradients: dict[str, bool] = {}

    def recording(learning_rate: float) -> float:
        gradients.update({name: parameter.grad is not None for name, parameter in named.items()})
        norm: float = step(learning_rate)
        return norm

    strategy._clip_and_step = recording
    strategy.train_step(batch, policy_loss, ("log_probs", "entropy"))
    after = jobs.weights_of(strategy)
    selected = list(strategy.named_full_weights(2**30, WeightSelection(trained_only=True)))
    return {
        "with_gradient": [name for name, has in gradients.items() if has],
        "optimizer_elements": sum(t.numel() for t in strategy._device_tensors(StateKind.OPTIMIZER_STATES)),
        "changed": [name for name, tensor in after.items() if not torch.equal(tensor, before[name])],
        "sent": [name for bucket in selected for name, _ in bucket],
    }


def types_that_arrive(role: Any, batch: dict[str, Any]) -> dict[str, set[torch.dtype]]:
    """Types of what the blocks of the vision tower are called with, in a forward pass."""
    from tests.strategies import jobs

    strategy = jobs.started(role)
    found: dict[str, set[torch.dtype]] = {"hidden": set(), "angles": set()}

    def record(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found["hidden"].add(args[0].dtype)
        found["angles"] |= {angle.dtype for angle in keywords["position_embeddings"]}

    for module in strategy.model.modules():
        if type(module).__name__.endswith("VisionBlock"):
            # Called last, so with what the module itself will see.
            module.register_forward_pre_hook(record, with_kwargs=True)
    strategy.forward(batch, ("log_probs",))
    return found


def log_probs_before_and_in_a_step(role: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the same weights: those of a forward pass, and those that the loss of an optimizer step gets."""
    from tests.strategies import jobs

    strategy = jobs.started(role, 10)
    before = strategy.forward(batch, [Output.LOG_PROBS])[Output.LOG_PROBS]
    rows: dict[int, torch.Tensor] = {}

    def loss(outputs: TensorBatch, part: TensorBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        for row, values in zip(part["row"].tolist(), outputs["log_probs"].detach(), strict=True):
            rows[row] = torch.nn.functional.pad(values, (0, before.shape[1] - len(values)))
        return outputs["log_probs"].sum(), {}

    strategy.train_step({**batch, "row": torch.arange(len(before))}, loss, [Output.LOG_PROBS])
    return before, torch.stack([rows[row] for row in range(len(before))])
