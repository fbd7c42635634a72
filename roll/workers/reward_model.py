"""The reward model's worker: a sequence-classification model that scores whole conversations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roll.distributed import Dispatch, register
from roll.models.build import load_config
from roll.rewards.base import RewardResult, failure
from roll.rollout.rewarding import ModelInput
from roll.strategies.base import ModelHead, ModelStrategy, Output, TensorBatch
from roll.workers.model import ModelWorker


class RewardModelWorker(ModelWorker):
    """``reward_model`` on one rank: forward passes only."""

    head = ModelHead.VALUE

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Load model and tokenizer.

        Raises:
            ValueError: a model without a score.
        """
        from transformers import AutoTokenizer

        args = self.context.role.model_args
        config = load_config(args)
        check_has_score(config.architectures, config.num_labels, str(args.model_name_or_path))
        self._longest = getattr(config, "max_position_embeddings", None)
        self._tokenizer = AutoTokenizer.from_pretrained(
            args.model_name_or_path, trust_remote_code=args.trust_remote_code
        )
        super().initialize(num_training_steps)

    @register(Dispatch.ONE_TO_ALL)
    def score(self, inputs: Sequence[ModelInput]) -> tuple[int, list[RewardResult]]:
        """Collective. The data-parallel rank and the results of its samples: every ``dp_size``-th from that one on."""
        info = self.rank_info
        own = inputs[info.dp_rank :: info.dp_size]
        sequences = [self._read(one) for one in own]
        usable = [sequence for sequence in sequences if not isinstance(sequence, RewardResult)]
        # A rank with nothing to score takes part in the others' collectives with a row that nobody asks for.
        scores = iter(last_token_scores(self.strategy, usable or [[0]]))
        results = [one if isinstance(one, RewardResult) else RewardResult(next(scores)) for one in sequences]
        return info.dp_rank, results

    def _read(self, given: ModelInput) -> list[int] | RewardResult:
        """Token ids, or why there are none."""
        if given.error is not None:
            return failure(given.error)
        token_ids = given.token_ids
        if token_ids is None:
            conversation = [*(given.messages or ()), {"role": "assistant", "content": given.response}]
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False)
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._longest is not None and len(token_ids) >= self._longest:
            return failure(f"{len(token_ids)} tokens are more than the reward model's {self._longest} positions")
        return list(token_ids)


def check_has_score(architectures: Sequence[str] | None, num_labels: int | None, path: str) -> None:
    """
    Raises:
        ValueError: no sequence-classification head, or one with several labels.
    """
    kinds = architectures or ()
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds) or num_labels != 1:
        kind = ", ".join(kinds) or "of no kind"
        raise ValueError(
            f"reward_model.model_args.model_name_or_path: {path} is {kind} with {num_labels} labels; a reward model "
            "is a ...ForSequenceClassification with one label"
        )


def last_token_scores(strategy: ModelStrategy, sequences: Sequence[list[int]]) -> list[float]:
    """Collective. The score at the last token of each sequence.

    A value belongs to the state in which a token is sampled, so to the tokens before it: one token is added behind each
    sequence, whose value is the score of the whole.
    """
    batch = scoring_batch(sequences)
    values = strategy.forward(batch, [Output.VALUES])[Output.VALUES]
    scores: list[float] = values[batch["response_mask"]].tolist()
    return scores


def scoring_batch(sequences: Sequence[list[int]]) -> TensorBatch:
    """Right-padded rows of each sequence and one token more, which is the response."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    positions = torch.arange(int(lengths.max()) + 1)
    input_ids = torch.zeros(len(sequences), len(positions), dtype=torch.long)
    for row, sequence in zip(input_ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return {
        "input_ids": input_ids,
        "attention_mask": positions <= lengths[:, None],
        "response_mask": positions == lengths[:, None],
    }
