"""The engine's self-test, and rotary angles that cached keys cannot follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, LlamaForCausalLM

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.strategies.engines.requests import GenerationRequest, longest_sequence
from roll.strategies.hf_infer.decoder import Decoder
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.generic import GenericDecoder
from roll.strategies.hf_infer.self_test import check_engine
from roll.strategies.hf_infer.strategy import HfInferStrategy, _before_angles_change, create_decoder
from tests.strategies.hf_infer.helpers import generate_greedy, greedy, random_prompts, run
from tests.strategies.moe_models import write_moe
from tests.strategies.samples import VOCABULARY

ROLE = WorkerConfig(name="actor_infer", model_args=ModelArguments(model_name_or_path="a-folder"))
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 8.0],
}


def llama(**options: Any) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 1}
    return LlamaConfig(initializer_range=0.2, **sizes, **options)


@pytest.mark.parametrize("options", [{}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}])
def test_what_is_right_passes(options):
    state = torch.get_rng_state()
    assert check_engine(ROLE, llama(**options), 128, create_decoder)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.default_rows("gpt_oss", "qwen3_next")
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_other_caches_pass(family, tmp_path):
    config = AutoModelForCausalLM.from_pretrained(write_moe(tmp_path, family)).config
    assert check_engine(ROLE, config, 64, create_decoder)


class Forgetful(GenericDecoder):
    """A decoder that shifts the positions of rows in decoding."""

    def _rotary_positions(self, slots: Any) -> torch.Tensor:
        return super()._rotary_positions(slots) + 1


def test_prompts_are_scored_by_the_model_s_own_logits():
    """Gemma 2 caps them after the output matrix."""
    config = Gemma2Config(
        **{**llama().to_dict(), "head_dim": 8, "final_logit_softcapping": 2.0, "model_type": "gemma2"}
    )
    config.layer_types = ["full_attention"] * 3
    assert not check_engine(ROLE, config, 64, create_decoder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    arguments = StrategyArguments(strategy_name="hf_infer")
    strategy = HfInferStrategy(WorkerConfig(name="actor_infer", strategy_args=arguments))
    strategy._decoder, strategy._plain_head = create_decoder(model, 64), False
    ids = [5, 9, 3, 30, 4]
    wanted = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    assert strategy.prompt_scores([ids], 1)[0].log_probs == pytest.approx(wanted[:, 0].tolist(), abs=1e-5)


@pytest.mark.long
def test_a_decoder_that_computes_something_else_is_refused(monkeypatch):
    scaled = llama(rope_parameters=LONGROPE)
    off = r"actor_infer.*llama model, decoded with a cache by hf_infer, are off by up to"
    with pytest.raises(ValueError, match=off):
        check_engine(ROLE, llama(), 128, lambda model, _: Forgetful(model))
    # The row of padding at the last position gives every row the long factors.
    with pytest.raises(ValueError, match=r"off by up to .*strategy_name: vllm"):
        check_engine(ROLE, scaled, 128, create_decoder)
    check_engine(ROLE, scaled, 32, create_decoder)


def test_rows_end_before_rotary_angles_change():
    config = llama(rope_parameters=LONGROPE)
    for written, wanted in ((None, 32), (32, 32), (20, 20)):
        found = _before_angles_change(written, longest_sequence(written, config, "a-folder"), config)
        assert found == wanted
    rule = r"max_model_len: 64, but the rotary angles .* more than 32 tokens.* at most 32"
    with pytest.raises(ValueError, match=rule):
        _before_angles_change(64, 64, config)
    assert _before_angles_change(128, 128, llama()) == 128
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    decoder: Decoder = create_decoder(model, 32)
    engine = GenerationEngine(decoder, str, (1,), 8, 32)
    prompts = [[2 + token % (VOCABULARY - 2) for token in prompt] for prompt in random_prompts([3, 12, 7], 0)]
    requests = [GenerationRequest(str(index), prompt, greedy(16), 1) for index, prompt in enumerate(prompts)]
    for (name, _), output in run(engine, requests).items():
        assert output.token_ids == generate_greedy(model, prompts[int(name)], 16)
