"""Prompts with images: the same tokens and log-probs as transformers, for every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from roll.protocol.vision import vision_token_ids
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams, interrupted
from roll.strategies.hf_infer.generic import VisionDecoder
from tests import vision_models
from tests.strategies.hf_infer.helpers import greedy, run
from tests.strategies.hf_infer.images import build_engine, forward
from tests.strategies.vision_cases import video_prompts, vision_keywords
from tests.vision_models import VisionPrompt

pytestmark = pytest.mark.default_rows("qwen2_5_vl", "qwen3_vl_moe")


@pytest.fixture(scope="module")
def tokenizer():
    return vision_models.tokenizer()


@pytest.fixture(scope="module", params=vision_models.KINDS)
def model(request, tokenizer):
    made = vision_models.model(tokenizer, request.param)
    # The head prefers the placeholders: whatever samples without masking them samples one soon.
    with torch.no_grad():
        made.lm_head.weight[list(vision_token_ids(made.config))] *= 3
    return made.requires_grad_(False)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """One image, two, none, and one of another size with more tokens."""
    return [
        vision_models.prompt(tokenizer, 1),
        vision_models.prompt(tokenizer, 2, num_images=2),
        vision_models.prompt(tokenizer, 3, num_images=0),
        vision_models.prompt(tokenizer, 4, size=(90, 50)),
    ]


def request(name: str, prompt: VisionPrompt, params: SamplingParams, num_samples: int = 1) -> GenerationRequest:
    return GenerationRequest(name, prompt.token_ids, params, num_samples, vision=prompt.vision)


def check(model: Any, prompt: VisionPrompt, output: GenerationOutput) -> None:
    reference = forward(model, prompt, output.token_ids)
    expected = reference.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=2e-5, rtol=1e-5)


def test_greedy_equals_generate(model, prompts):
    engine = build_engine(model)
    outputs = run(engine, [request(str(i), one, greedy(14), 2) for i, one in enumerate(prompts)])
    for i, one in enumerate(prompts):
        ids = torch.tensor([one.token_ids])
        images = {} if one.vision is None else vision_keywords([one.vision], ids, model.config)
        model.model.rope_deltas = None
        expected = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **images,
            do_sample=False,
            max_new_tokens=14,
            eos_token_id=None,
            suppress_tokens=list(vision_token_ids(model.config)),
        )[0, ids.shape[1] :].tolist()
        assert outputs[str(i), 0].token_ids == outputs[str(i), 1].token_ids == expected
        check(model, one, outputs[str(i), 0])


def test_sampled_tokens_have_their_log_probs_and_no_placeholder_is_among_them(model, prompts):
    engine = build_engine(model, max_num_seqs=5)
    params = SamplingParams(20, temperature=1.0, seed=3)
    outputs = run(engine, [request(str(i), one, params, 3) for i, one in enumerate(prompts)])
    for (name, _), output in outputs.items():
        assert not set(output.token_ids) & set(vision_token_ids(model.config))
        check(model, prompts[int(name)], output)
    # Two prompts of one image, one of two, however many samples: four images, each seen once.
    decoder = engine._decoder
    assert isinstance(decoder, VisionDecoder)
    assert decoder.num_towers == 4


def test_interrupted_samples_and_other_weights(model, prompts):
    """A sample continues elsewhere with its images, and after an update the tower sees them anew."""
    params = SamplingParams(16, temperature=1.0, seed=5)
    engine, given = build_engine(model), request("r", prompts[1], params, 2)
    whole = run(engine, [given])
    other = build_engine(model)
    other.add_requests([given])
    for _ in range(6):
        other.step()
    rest = interrupted(given, other.abort(), ())
    assert rest.vision is prompts[1].vision
    engine.set_version(1)
    again = run(engine, [rest])
    for index in range(2):
        assert again["r", index].token_ids == whole["r", index].token_ids
        np.testing.assert_allclose(again["r", index].log_probs, whole["r", index].log_probs, atol=2e-5)
    decoder = engine._decoder
    assert isinstance(decoder, VisionDecoder)
    assert decoder.num_towers == 4

    engine.add_requests([replace(given, request_id="running")])
    engine.step()
    engine.set_version(2)
    engine.recompute_running()
    while engine.num_unfinished:
        finished = engine.step()
    for output in finished:
        check(model, prompts[1], output)


def test_videos(model, prompts):
    """Greedy and sampled, next to prompts of images, each seen once; the log-probs are those of a forward pass, also
    where the times of a video go beyond the positions of the text behind it."""
    given = [*video_prompts(model.config.model_type), prompts[1]]
    engine = build_engine(model)
    for params in (greedy(10), SamplingParams(10, temperature=1.0, seed=3)):
        outputs = run(engine, [request(str(i), one, params, 2) for i, one in enumerate(given)])
        for (name, _), output in outputs.items():
            assert not set(output.token_ids) & set(vision_token_ids(model.config))
            check(model, given[int(name)], output)
        if not params.temperature:
            assert outputs["0", 0].token_ids == outputs["0", 1].token_ids
    decoder = engine._decoder
    assert isinstance(decoder, VisionDecoder)
    assert decoder.num_towers == 8, "three videos, two videos and an image, two images, each seen once"


def test_conversations_about_videos_continue(model):
    """A longer prompt takes the shorter one's from the prefix cache; equal tokens with other frames are another."""
    first, twin, mixed, *_ = video_prompts(model.config.model_type)
    engine = build_engine(model, prefix_cache_tokens=1000)
    for start in (first, mixed):
        answer = run(engine, [request("1", start, greedy(6))])["1", 0].token_ids
        reused = engine._prefixes.num_reused
        longer = VisionPrompt([*start.token_ids, *answer, 9, 10, 11], start.vision)
        check(model, longer, run(engine, [request("longer", longer, greedy(8))])["longer", 0])
        assert engine._prefixes.num_reused - reused >= len(start.token_ids) + len(answer) - 1
    check(model, twin, run(engine, [request("twin", twin, greedy(8))])["twin", 0])
    cut = first.token_ids[:]
    cut.remove(model.config.video_token_id)
    with pytest.raises(ValueError, match="17 of videos, and its 1 videos have 18"):
        engine.add_requests([GenerationRequest("r", cut, greedy(4), vision=first.vision)])


def test_conversations_of_text_and_images_continue_together(model, prompts, tokenizer):
    """Each behind its own prefix, with the positions of its own; equal tokens with another image are another prompt."""
    engine = build_engine(model, prefix_cache_tokens=1000)
    starts = {"text": prompts[2], "image": prompts[0]}
    answers = run(engine, [request(name, start, greedy(6)) for name, start in starts.items()])
    further = {
        name: VisionPrompt([*start.token_ids, *answers[name, 0].token_ids, 9, 10, 11], start.vision)
        for name, start in starts.items()
    }
    given = further | {"swapped": VisionPrompt(prompts[0].token_ids, vision_models.prompt(tokenizer, 40).vision)}
    outputs = run(engine, [request(name, prompt, greedy(8)) for name, prompt in given.items()])
    assert engine._prefixes.num_reused >= sum(len(prompt.token_ids) - 4 for prompt in further.values())
    for name, prompt in given.items():
        check(model, prompt, outputs[name, 0])


def test_prompts_that_do_not_go_with_their_images(model, prompts):
    engine, image = build_engine(model), model.config.image_token_id
    cut = prompts[0].token_ids[:]
    cut.remove(image)
    for token_ids, vision in ((cut, prompts[0].vision), (prompts[0].token_ids, None)):
        with pytest.raises(ValueError, match=r"placeholders of images, and its \d images have"):
            engine.add_requests([GenerationRequest("r", token_ids, greedy(4), vision=vision)])
    vision = prompts[0].vision
    assert vision is not None
    coarse = replace(vision, processing=replace(vision.processing, patch_size=16))
    with pytest.raises(ValueError, match="patches of 1536 numbers"):
        engine.add_requests([GenerationRequest("r", prompts[0].token_ids, greedy(4), vision=coarse)])
