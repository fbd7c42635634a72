"""Images of a batch: positions, features shared by rows, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from roll.models import patterns
from roll.models.layout_setup import use_layout_attention
from roll.models.layouts import padded, row_layout, tree_layout
from roll.models.log_probs import ResponseModel
from roll.models.vision import FEATURES, POSITIONS, PROMPT_KEYS, rope_positions, with_images
from roll.protocol.vision import IMAGES, VisionInputs, vision_token_ids
from tests import vision_models
from tests.strategies import vision_cases
from tests.strategies.samples import policy_loss


@pytest.fixture(scope="module")
def model() -> Any:
    return vision_models.model(vision_models.tokenizer(), "qwen3_vl")


@pytest.mark.parametrize("videos", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_the_models_own(kind: Any, videos: bool) -> None:
    """Also of a video whose times go beyond the positions of the text behind it."""
    own = vision_models.model(vision_models.tokenizer(), kind)
    batch = vision_cases.make_batch(videos=kind) if videos else vision_cases.make_batch()
    inputs = vision_cases.plain_inputs(own, batch)
    for name in ("pixel_values", "pixel_values_videos"):
        inputs.pop(name, None)
    wanted, _ = own.model.get_rope_index(**inputs)
    columns, pool = with_images(batch, own.config)
    assert torch.equal(columns[POSITIONS].movedim(-1, 0), wanted)
    assert pool is not None and len(pool.images) == 5 + videos, "rows of a group share theirs"
    assert IMAGES not in columns
    if videos:
        long = columns[POSITIONS][9]
        assert (int(long[:, 0].max()) > int(long[:, 1].max())) == (kind == "qwen2_5_vl")


@pytest.mark.parametrize("kind", vision_models.KINDS)
def test_turns_with_images_share_what_shows_the_same(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """A turn, and three that follow it with another image: the last one's differs, though its ids are the same."""
    monkeypatch.setattr(patterns, "MIN_SHARED", 4)
    own = vision_models.model(vision_models.tokenizer(), kind).requires_grad_(True)
    first, twin, *_ = vision_cases.prompts()
    assert first.vision is not None and twin.vision is not None
    answers = [[20 + 10 * turn + place for place in range(5)] for turn in range(4)]

    def turn(number: int, seen: Any) -> Any:
        images = tuple(image for one in seen for image in one.images)
        vision = VisionInputs(images, first.vision.processing, np.concatenate([one.grid_thw for one in seen]))
        ids = [*first.token_ids, *(answers[0] + first.token_ids if len(seen) > 1 else [])]
        return vision_models.VisionPrompt(ids, vision), answers[number]

    others: list[list[Any]] = [[], [first.vision], [first.vision], [twin.vision]]
    rows = [turn(number, [first.vision, *rest]) for number, rest in enumerate(others)]
    batch = vision_cases.assembled(rows)
    batch["advantages"] = torch.randn(4, 1, generator=torch.Generator().manual_seed(0)) * batch["response_mask"]
    batch["num_tokens"] = batch["response_mask"].sum().expand(4)
    own.model.rope_deltas = None
    wanted = vision_cases.plain_outputs(own, batch)
    policy_loss(wanted, batch)[0].backward()
    expected = {name: parameter.grad.clone() for name, parameter in own.named_parameters()}
    columns, pool = with_images(batch, own.config)
    assert pool is not None and len(pool.images) == 2
    use_layout_attention(own, "use_prefix_sharing")
    layout = tree_layout(columns["input_ids"], columns["response_mask"], prompt_keys=columns[PROMPT_KEYS])
    begins, prompt = first.token_ids.index(own.config.image_token_id), len(first.token_ids)
    # Both continue the first turn; the last one up to its other image.
    assert layout.input_ids.numel() == (2 * prompt + 5 + 4) + 4 + (prompt - begins + 4)
    own.zero_grad()
    attached = pool.attach(layout, columns)
    found = ResponseModel(own)(attached, ("log_probs", "entropy"))
    outputs = {key: attached.scatter(value, batch["response_mask"].shape) for key, value in found.items()}
    for key, value in outputs.items():
        torch.testing.assert_close(value, wanted[key], atol=2e-5, rtol=1e-5)
    policy_loss(outputs, batch)[0].backward()
    for key, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], atol=2e-6, rtol=1e-4, msg=key)


def test_positions_of_several_frames_by_hand() -> None:
    """Two tokens of text, an image of 2 frames of 1 x 2 features, a token of text, padding."""
    features = torch.tensor([[-1, -1, 0, 1, 2, 3, -1, -1]])
    mask = torch.tensor([[True] * 7 + [False]])
    positions = rope_positions(features, mask, torch.tensor([[2, 2, 4]]), merge_size=2, intervals=[1.0])
    assert positions[0].tolist() == [
        [0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [3, 2, 2], [3, 2, 3], [4, 4, 4], [0, 0, 0],
    ]  # fmt: skip


def test_the_tower_sees_an_image_once(model: Any) -> None:
    """Eight answers about one image, then in the chunks of two ranks."""
    batch = vision_cases.make_batch(which=(0,), group_size=8)
    columns, pool = with_images(batch, model.config)
    assert pool is not None
    ids, mask = columns["input_ids"], columns["response_mask"]
    seen: list[int] = []
    hook = model.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    layouts = [row_layout(ids, mask), tree_layout(ids, mask, prompt_keys=columns[PROMPT_KEYS])]
    for layout in (pool.attach(layout, columns) for layout in layouts):
        seen.clear()
        if layout.pattern is None:
            ResponseModel(model)(layout, ("log_probs",))
            assert seen == [36], "the patches of one image of 48 x 48"
        images = layout.images
        assert images is not None and len(images.pixel_values) == 36
        width = layout.input_ids.shape[1] + layout.input_ids.shape[1] % 2
        chunks = [padded(layout, len(layout.input_ids), width).chunk(rank, 2) for rank in range(2)]
        found = [0 if chunk.images is None else len(chunk.images.tokens) for chunk in chunks]
        assert sum(found) == len(images.tokens)
        assert found[1] == 0, "the second half of the tokens has no image, so its rank needs no pixels"
    hook.remove()


def test_images_tell_prompts_apart(model: Any) -> None:
    """Two prompts of the same ids with different images are two, and a row without a response needs no image."""
    batch = vision_cases.make_batch(which=(0, 1), group_size=2)
    columns, _ = with_images(batch, model.config)
    assert torch.equal(columns["input_ids"][0, :20], columns["input_ids"][2, :20])
    assert not torch.equal(columns[PROMPT_KEYS][0], columns[PROMPT_KEYS][2])
    assert (columns[FEATURES].amax(1) >= 0).tolist() == [True, False, True, True]


def test_the_tower_gets_zeros_from_text_alone(model: Any) -> None:
    batch = vision_cases.make_batch(which=(4,), group_size=2)
    columns, pool = with_images(batch, model.config)
    assert pool is None
    response_model = ResponseModel(model.requires_grad_(True))
    outputs = response_model(row_layout(columns["input_ids"], columns["response_mask"]), ("log_probs",))
    outputs["log_probs"].sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    tower = [gradient for name, gradient in gradients.items() if name.startswith("model.visual.")]
    assert len(tower) == 39 and all(gradient is not None and not gradient.any() for gradient in tower)
    model.zero_grad()


def test_what_does_not_fit_is_refused_by_row(model: Any) -> None:
    batch = vision_cases.make_batch(which=(0, 4), group_size=2)
    image, other = int(model.config.image_token_id), vision_token_ids(model.config)[-1]
    cut = {**batch, "input_ids": batch["input_ids"].clone()}
    cut["input_ids"][1][cut["input_ids"][1] == image] = 20
    with pytest.raises(ValueError, match="row 1 of the batch has 0 image placeholders, but its images have 9 features"):
        with_images(cut, model.config)
    film = vision_cases.make_batch(which=(0,), group_size=1, videos="qwen3_vl")
    film["input_ids"][film["input_ids"] == model.config.video_token_id] = image
    with pytest.raises(ValueError, match="row 0 of the batch has 18 image placeholders, but its images have 0 feat"):
        with_images(film, model.config)
    sampled = {**batch, "input_ids": torch.where(batch["response_mask"], other, batch["input_ids"])}
    with pytest.raises(ValueError, match=f"row 0 of the batch has token {other}, a placeholder of an image"):
        with_images(sampled, model.config)
    text_model: Any = model.config.text_config
    with pytest.raises(ValueError, match="the batch has images, but the qwen3_vl_text model reads none"):
        with_images(batch, text_model)
    nobody = {**batch, IMAGES: np.array([None] * 4, dtype=object)}
    nobody["input_ids"] = torch.where(batch["input_ids"] == image, 20, batch["input_ids"])
    assert with_images(nobody, text_model)[1] is None
