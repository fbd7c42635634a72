"""A reward model gives the logits of transformers' own sequence classification, under every way of computing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2ForSequenceClassification

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.strategies.base import ModelHead, create_strategy
from roll.workers.model import check_has_score, last_token_scores

SEQUENCES = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 0, 0, 3], [30, 31]]
TOLERANCE = 1e-5
"""Float32 sums in another order."""


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("reward_model")
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder


def wanted_scores(folder: Path) -> list[float]:
    """One sequence at a time, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([sequence])).logits[0, 0].item() for sequence in SEQUENCES]


def scores_of_rank(folder: str, strategy: str, settings: dict[str, Any]) -> tuple[int, int, list[float]]:
    """The first of this rank's sequences, the distance to the next, and their scores."""
    sizes = {name: size for name, size in settings.items() if name.endswith("_parallel_size")}
    arguments = StrategyArguments(strategy_name=strategy, strategy_config=sizes)
    model_args = ModelArguments(model_name_or_path=folder, dtype="fp32", disable_gradient_checkpointing=True)
    role = WorkerConfig(
        name="reward_model",
        model_args=model_args,
        strategy_args=arguments,
        infer_batch_size=2,
        **{name: value for name, value in settings.items() if name not in sizes},
    )
    computed = create_strategy(role, head=ModelHead.VALUE)
    computed.initialize()
    info = computed.rank_info
    return info.dp_rank, info.dp_size, last_token_scores(computed, SEQUENCES[info.dp_rank :: info.dp_size])


CASES = [
    ("hf_infer", 1, {"use_remove_padding": True}),
    ("fsdp2_infer", 2, {}),
    ("fsdp_infer", 2, {}),
    ("deepspeed_infer", 2, {}),
    ("megatron_infer", 4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
]
PACKAGES = {"deepspeed_infer": "deepspeed", "megatron_infer": "megatron"}


@pytest.mark.default_rows("hf_infer-*", "fsdp2_infer-*")
@pytest.mark.parametrize(("strategy", "ranks", "settings"), CASES)
def test_scores_are_those_of_transformers(run_ranks, reward_model, strategy, ranks, settings):
    package = PACKAGES.get(strategy, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    wanted = wanted_scores(reward_model)
    assert max(wanted) - min(wanted) > 0.1, "scores that differ"
    shares = run_ranks(ranks, scores_of_rank, str(reward_model), strategy, settings)
    assert {first for first, _, _ in shares} == set(range(shares[0][1])), "every sequence is somebody's"
    for first, stride, scores in shares:
        assert scores == pytest.approx(wanted[first::stride], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("architectures", "labels"), [(None, 1), (["Qwen2ForCausalLM"], 1), (["Qwen2ForSequenceClassification"], 2)]
)
def test_a_model_without_a_score_is_refused(architectures, labels):
    with pytest.raises(ValueError, match="ForSequenceClassification with one label"):
        check_has_score(architectures, labels, "owner/model")
    check_has_score(["LlamaForSequenceClassification"], 1, "owner/model")
