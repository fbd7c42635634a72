"""Log-probs, distributions, seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.engines.sampling import filter_threshold, invert_cumulative, stream_key, uniforms
from tests.strategies.hf_infer.helpers import (
    VOCAB_SIZE,
    build_engine,
    build_model,
    random_prompts,
    reference_log_probs,
    run,
    sampling_distribution,
)

SETTINGS = {
    "plain": SamplingParams(24),
    "temperature": SamplingParams(24, temperature=0.6),
    "top_k": SamplingParams(24, top_k=7),
    "top_k of one": SamplingParams(24, top_k=1),
    "top_k beyond the vocabulary": SamplingParams(24, top_k=10_000),
    "top_p": SamplingParams(24, top_p=0.7),
    "tiny top_p": SamplingParams(24, top_p=1e-6),
    "top_k and top_p": SamplingParams(24, temperature=1.3, top_k=20, top_p=0.8),
    "min_p": SamplingParams(24, min_p=0.2),
    "everything": SamplingParams(24, 10, temperature=0.8, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
    "repetition penalty": SamplingParams(24, repetition_penalty=1.5),
    "greedy": SamplingParams(24, temperature=0),
    "greedy ignores filters": SamplingParams(24, temperature=0, top_k=3, top_p=0.5, min_p=0.5),
    "greedy with penalty": SamplingParams(24, temperature=0, repetition_penalty=1.5),
    "no early stop": SamplingParams(24, min_new_tokens=24, stop_token_ids=(5, 6)),
}


@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_log_probs_equal_a_full_forward_with_every_setting_in_one_batch(kind):
    model = build_model("qwen3")
    prompts = dict(zip(SETTINGS, random_prompts([4 + i for i in range(len(SETTINGS))]), strict=True))
    requests = [GenerationRequest(name, prompts[name], params, num_samples=2) for name, params in SETTINGS.items()]
    for (name, _), output in run(build_engine(model, kind, max_num_seqs=9), requests).items():
        expected = reference_log_probs(model, prompts[name], output.token_ids, SETTINGS[name])
        # float32 forward passes with other shapes differ by a few 1e-6 in the logits.
        np.testing.assert_allclose(output.log_probs, expected, rtol=0, atol=5e-5, err_msg=name)


@pytest.mark.long
def test_log_probs_equal_a_full_forward_with_one_setting():
    """Batches of one kind take shorter ways through the sampler than mixed ones."""
    model, prompts = build_model("qwen2"), random_prompts([3, 8])
    for name, params in SETTINGS.items():
        requests = [GenerationRequest(str(i), prompt, params, num_samples=2) for i, prompt in enumerate(prompts)]
        for (i, _), output in run(build_engine(model), requests).items():
            expected = reference_log_probs(model, prompts[int(i)], output.token_ids, params)
            np.testing.assert_allclose(output.log_probs, expected, rtol=0, atol=5e-5, err_msg=name)


@pytest.mark.default_rows("fused-dtype0", "generic-dtype1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_half_precision_log_probs(kind, dtype):
    model = build_model("qwen3", dtype)
    exact = build_model("qwen3")
    exact.load_state_dict(model.state_dict())
    prompts, params = random_prompts([4, 9, 2]), SamplingParams(20)
    requests = [GenerationRequest(str(i), prompt, params, num_samples=4) for i, prompt in enumerate(prompts)]
    ours, theirs = [], []
    for (i, _), output in run(build_engine(model, kind), requests).items():
        full = reference_log_probs(exact, prompts[int(i)], output.token_ids, params)
        same = reference_log_probs(model, prompts[int(i)], output.token_ids, params)
        ours += [abs(a - b) for a, b in zip(output.log_probs, full, strict=True)]
        theirs += [abs(a - b) for a, b in zip(same, full, strict=True)]
    # Rounding differs token by token; what counts is that ours is no worse than the model's own forward.
    assert np.mean(ours) < 1.5 * np.mean(theirs)
    assert np.mean(ours) < 0.1


@pytest.mark.parametrize("params", [SamplingParams(1, seed=3), SamplingParams(1, temperature=0.7, top_k=30, seed=4)])
def test_sampled_distribution(params):
    model, (prompt,) = build_model("qwen2"), random_prompts([6])
    num_samples = 6000
    outputs = run(build_engine(model, max_num_seqs=500), [GenerationRequest("r", prompt, params, num_samples)])
    counts = np.bincount([output.token_ids[0] for output in outputs.values()], minlength=VOCAB_SIZE)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    expected = sampling_distribution(logits, prompt, 0, params).exp().numpy() * num_samples
    assert not counts[expected == 0].any()
    common = expected >= 5
    rest = (counts[~common].sum() - expected[~common].sum()) ** 2 / max(expected[~common].sum(), 1)
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum() + rest
    degrees = common.sum()
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)  # mean and four standard deviations of chi-square


def test_seeded_samples_do_not_depend_on_their_neighbours():
    model = build_model("qwen2")
    prompts = random_prompts([5, 12, 3, 20])
    seeded = GenerationRequest("seeded", prompts[0], SamplingParams(30, seed=7), num_samples=3)
    alone = run(build_engine(model), [seeded])
    others = [GenerationRequest(str(i), p, SamplingParams(25, top_p=0.9), 2) for i, p in enumerate(prompts[1:])]
    among = run(build_engine(model, max_num_seqs=4, seed=1), [others[0], seeded, *others[1:]])
    for i in range(3):
        assert among["seeded", i].token_ids == alone["seeded", i].token_ids
    assert len({tuple(output.token_ids) for output in alone.values()}) == 3


def test_engine_seed_repeats_and_changes_samples():
    model, (prompt,) = build_model("qwen2"), random_prompts([5])
    requests = [GenerationRequest(str(i), prompt, SamplingParams(20), num_samples=2) for i in range(3)]
    first, again, other = (run(build_engine(model, seed=seed), requests) for seed in (1, 1, 2))
    assert first == again
    assert all(first[key].token_ids != other[key].token_ids for key in first)
    assert len({tuple(output.token_ids) for output in first.values()}) == 6


def test_uniforms_are_the_published_generator() -> None:
    # SplitMix64 seeded with 0 begins with these outputs.
    published = np.array([0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F], dtype=np.uint64)
    drawn = uniforms(np.zeros(3, np.uint64), np.arange(3))
    np.testing.assert_array_equal(drawn, (published >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def test_streams_of_neighbouring_seeds_and_samples_are_unrelated():
    keys = np.array([stream_key(seed, i) for seed in range(64) for i in range(64)], dtype=np.uint64)
    assert len(np.unique(keys)) == len(keys)
    draws = np.stack([uniforms(keys, np.full(len(keys), t)) for t in range(32)])
    assert abs(draws.mean() - 0.5) < 4 * np.sqrt(1 / 12 / draws.size)
    correlation = np.corrcoef(draws.reshape(32, 64, 64)[:, :-1].ravel(), draws.reshape(32, 64, 64)[:, 1:].ravel())[0, 1]
    assert abs(correlation) < 4 / np.sqrt(draws.size)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=1, max_size=200).filter(any),
    repeats=st.sampled_from([1, 7]),
    draw=st.one_of(st.just(0.0), st.just(1 - 2.0**-53), st.floats(0, 1, exclude_max=True)),
)
def test_inverting_the_cumulative_distribution(weights, repeats, draw):
    probs = torch.tensor([weights * repeats], dtype=torch.float32)  # short rows and rows that are summed in blocks
    token = int(invert_cumulative(probs, torch.tensor([draw], dtype=torch.float64)))
    assert probs[0, token] > 0
    cumulative = np.cumsum(probs[0].double().numpy())
    below = cumulative[token - 1] if token else 0.0
    # Block sums are float32, of at most 64 terms each.
    slack = 1e-5 * cumulative[-1]
    assert below - slack <= draw * cumulative[-1] <= cumulative[token] + slack


def test_a_large_vocabulary_is_inverted_without_drift():
    size = 151_936
    probs = torch.full((1, size), 1 / size)
    for draw in np.linspace(0, 1, 97, endpoint=False):
        token = int(invert_cumulative(probs, torch.tensor([draw])))
        assert abs(token - draw * size) <= 1 + 1e-6 * size


def test_top_p_over_a_flat_large_vocabulary_sorts_what_it_must():
    logits = torch.arange(5000.0)[None].flip(1) * 1e-4  # the first thousand candidates hold far less than half the mass
    threshold = filter_threshold(logits, None, torch.tensor([0.5]), None)
    kept = int((logits >= threshold[:, None]).sum())
    mass = logits.double().softmax(-1)[0].cumsum(0)
    assert mass[kept - 2] < 0.5 <= mass[kept - 1] + 1e-6
