"""hf_infer: a role's model as a :class:`GenerationEngine`, or computing log-probs of batches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from roll.config.roles import WorkerConfig
from roll.config.strategies.engines import FUSED_MODELS, HfInferStrategyConfig
from roll.config.weight_files import file_of_each_tensor
from roll.models.build import (
    DTYPES,
    auto_class,
    build_model,
    checked_config,
    eager_or_default,
    empty_model,
    load_config,
    local_folder,
)
from roll.models.experts import RoutingRecorder, sparse_layers
from roll.models.invariant import ELEMENTS, check_processor, computes_invariantly, is_invariant, make_invariant
from roll.models.kernels import use_products
from roll.models.layout_setup import FULL, SLIDING, dependent_rotaries, longest_alike
from roll.models.stored import StoredLayout, use_names_of
from roll.platforms import current_platform
from roll.protocol.columns import copy_into
from roll.strategies.base import OffloadedStorages
from roll.strategies.engines.base import GenerationStrategy
from roll.strategies.engines.requests import PromptScore, longest_sequence
from roll.strategies.engines.sampling import JsonGrammars
from roll.strategies.hf_infer.decoder import Decoder, FusedDecoder
from roll.strategies.hf_infer.drafts import Drafter
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.generic import LINEAR, GenericDecoder, VisionDecoder
from roll.strategies.hf_infer.self_test import check_engine
from roll.strategies.training.data_parallel import DataParallelStrategy
from roll.weight_sync.encoding import tensor_checksum

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary angles that do not change with the length."""
SCORED_POSITIONS = 256  # tokens of a prompt whose logits are in memory at a time


class HfInferStrategy(GenerationEngine, GenerationStrategy):
    """Generation by transformers models, with continuous batching, on CPU or GPU."""

    _config: HfInferStrategyConfig

    def __init__(self, role: WorkerConfig, seed: int = 42) -> None:
        GenerationStrategy.__init__(self, role, seed)
        self._updated: dict[str, int] = {}  # checksums of the tensors of the update in progress
        self._asleep: OffloadedStorages | None = None
        # The logits are the output matrix's, and need not be computed for all positions at a time.
        self._plain_head = True

    def initialize(self) -> None:
        tokenizer: Any
        config, tokenizer = self._read_model_folder(self._config.max_model_len)
        max_model_len = _before_angles_change(self._config.max_model_len, self._max_model_len, config)
        self._plain_head = check_engine(self.role, config, max_model_len, create_decoder)
        model = _load_model(self.role, self._config.load_format)
        self._stored = StoredLayout(model).on_the_way()
        decoder = create_decoder(model, max_model_len)
        if self.role.router_replay.mode == "R3":
            if not (layers := sparse_layers(decoder.model)):
                raise ValueError(
                    f"{self.role.name}.router_replay.mode: R3 records experts, and "
                    f"{self.role.model_args.model_name_or_path} has none; set it to disabled"
                )
            decoder.routing = RoutingRecorder(layers)
        GenerationEngine.__init__(
            self,
            decoder,
            partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
            self._end_token_ids,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=max_model_len,
            seed=self.seed,
            # A prompt found in the cache is not computed, so nothing of it would be recorded.
            prefix_cache_tokens=0 if decoder.routing is not None else self._config.prefix_cache_tokens,
            grammars=JsonGrammars(tokenizer, decoder.vocab_size, self._end_token_ids),
            drafter=self._new_drafter(decoder),
        )
        logger.info(
            "hf_infer: up to %d samples of %d tokens; KV cache of %.1f MiB on %s",
            self._config.max_num_seqs,
            max_model_len,
            sum(tensor.nbytes for tensor in (self._cache.data, *self._cache.states)) / 2**20,
            decoder.device,
        )

    def _new_drafter(self, decoder: Decoder) -> Drafter | None:
        if (wanted := self._config.speculative_config) is None:
            return None
        if not isinstance(decoder, FusedDecoder):
            raise ValueError(
                f"{self.role.name}.strategy_args.strategy_config.speculative_config: this "
                f"{type(decoder.model).__name__} has layers of other kinds than full attention with fixed rotary "
                "angles, whose drafts hf_infer cannot verify; leave it out"
            )
        room = wanted.max_batch_tokens or (16 if decoder.device.type == "cpu" else 256)
        return Drafter(wanted.num_speculative_tokens, wanted.suffix_decoding_min_token_prob, room)

    @torch.no_grad()
    def prompt_scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        """See the base class; separate passes without cache, with the logits of a few hundred positions at a time."""
        model: Any = self._decoder.model
        head: Any = model.get_output_embeddings() if self._plain_head else torch.nn.Identity()
        scores = []
        for token_ids in prompts:
            ids = torch.tensor([list(token_ids)], device=self._decoder.device)
            if self._plain_head:
                hidden = model.base_model(input_ids=ids, use_cache=False)[0][0, :-1]
            else:
                hidden = model(input_ids=ids, use_cache=False).logits[0, :-1]
            score = PromptScore([], [], [])
            for begin in range(0, len(hidden), SCORED_POSITIONS):
                part = head(hidden[begin : begin + SCORED_POSITIONS]).float().log_softmax(-1)
                own = part.gather(1, ids[0, 1 + begin : 1 + begin + len(part), None])
                score.log_probs.extend(own[:, 0].tolist())
                score.ranks.extend(((part > own).sum(-1) + 1).tolist())
                found = part.topk(part.shape[-1] if top < 0 else min(top, part.shape[-1]))
                rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
                score.top.extend(list(zip(*row, strict=True)) for row in rows)
            scores.append(score)
        return scores

    @torch.no_grad()
    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See the base class; a tensor of another dtype is converted to the engine's. ValueError for a name that the
        model does not have, or a tensor of another shape; RuntimeError outside of an update."""
        self._updating("update_weights")
        weights = self.held_weights()
        for name, tensor in tensors.items():
            if name not in weights:
                raise ValueError(f"hf_infer: the model has no tensor {name!r}; it has e.g. {next(iter(weights))!r}")
            if weights[name].shape != tensor.shape:
                raise ValueError(
                    f"hf_infer: {name} has shape {tuple(tensor.shape)}, the engine's is {tuple(weights[name].shape)}"
                )
            copy_into(weights[name], tensor)
            # Of the engine's own tensor, and now, while the trainer gathers the next bucket: at the end of the update
            # every engine and the trainer would wait for it.
            self._updated[name] = tensor_checksum(weights[name])

    def finish_weight_update(self) -> dict[str, int]:
        """See the base class; the checksums are those of the tensors of this update."""
        self.set_version(self._updating("finish_weight_update"))
        if self._config.in_flight_update == "recompute":
            self.recompute_running()
        self._new_version = None
        updated, self._updated = self._updated, {}
        return updated

    def held_weights(self) -> dict[str, torch.Tensor]:
        """See the base class; views of what the engine computes with."""
        return self._stored.views(self._decoder.weights)

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory, also on a CPU."""
        self._check_idle()
        if self._asleep is None:
            self._prefixes.clear()
            self._cache.data, self._cache.states = self._cache.data.new_empty(0), []
            self._asleep = OffloadedStorages(self._decoder.weights.values())
            current_platform().empty_cache()

    def wake(self, weights_only: bool = False) -> None:
        if self._asleep is not None:
            self._asleep.restore()
            self._asleep = None
        if not weights_only and not self._cache.data.numel():
            self._cache = self._new_cache()

    def shutdown(self) -> None:
        vars(self).clear()


def _before_angles_change(written: int | None, max_model_len: int, config: PretrainedConfig) -> int:
    """At most the length up to which rotary angles stay as they are: cached keys cannot follow them. Raises ValueError:
    ``written``, which is ``strategy_config.max_model_len``, is more."""
    alike = min(map(longest_alike, dependent_rotaries(empty_model(config, "causal_lm"))), default=max_model_len)
    if max_model_len <= alike:
        return max_model_len
    why = f"the rotary angles of a {config.model_type} model are other ones in rows of more than {alike} tokens"
    if written is not None:
        raise ValueError(
            f"strategy_config.max_model_len: {written}, but {why}, and keys in the cache keep theirs; give at most "
            f"{alike}, or set strategy_args.strategy_name: vllm"
        )
    logger.info("hf_infer: max_model_len is %d, since %s", alike, why)
    return alike


def check_strict_copy(role: WorkerConfig) -> None:
    """Try ``strict_on_policy`` with a small copy of the role's model, and this processor; ValueError for log-probs that
    are not equal, see also :func:`~roll.models.invariant.check_processor`."""
    config = checked_config(role.model_args, "causal_lm")
    check_processor(empty_model(config, "causal_lm"), DTYPES[role.model_args.dtype])
    check_engine(role, config, longest_sequence(None, config, str(role.model_args.model_name_or_path)), create_decoder)


def create_decoder(model: PreTrainedModel, max_model_len: int) -> Decoder:
    """The fused decoder where the model's family allows it, the generic one elsewhere. Raises ValueError: layers of
    another kind than causal attention, to all tokens or a window, and linear attention."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    known = {FULL, SLIDING, LINEAR} if getattr(model.config, "vision_config", None) is None else {FULL}
    if kinds - known:
        raise ValueError(
            f"hf_infer: {type(model).__name__} has layers of type {', '.join(sorted(kinds - known))}; the engine "
            f"computes {', '.join(sorted(known))}"
        )
    model.requires_grad_(False).eval()
    decoder: Decoder
    config: Any = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    has_window = window and max_model_len > window if not types else set(types) != {FULL}
    is_plain = type(model).__name__ in FUSED_MODELS and not has_window
    is_plain = is_plain and config.hidden_act == "silu" and rope in _STATIC_ROPE
    if getattr(config, "vision_config", None) is not None:
        decoder = VisionDecoder(model)
    elif is_plain and not (computes_invariantly(model) and config.intermediate_size % ELEMENTS):
        decoder = FusedDecoder(model, max_model_len)
    else:
        decoder = GenericDecoder(model)
    logger.info("hf_infer: %s is computed by %s", type(model).__name__, type(decoder).__name__)
    return decoder


def _load_model(role: WorkerConfig, load_format: str) -> Any:
    config = load_config(role.model_args)
    # The engine passes its own masks, which flash-attention kernels do not take.
    args = replace(role.model_args, attn_implementation=eager_or_default(role.model_args, config))
    dtype = DTYPES[args.dtype]
    device = current_platform().device()
    model: Any
    if load_format != "dummy":
        model = build_model(args, "causal_lm", dtype)
        if is_invariant(role.model_args):
            make_invariant(model)
            check_processor(model, dtype)
        else:
            use_products(model)
        return model.to(device)
    model = auto_class(config, "causal_lm").from_config(
        config, dtype=dtype, attn_implementation=args.attn_implementation, trust_remote_code=args.trust_remote_code
    )
    for name, buffer in model.named_buffers():
        if any(kept in name for kept in model._keep_in_fp32_modules_strict or ()):
            buffer.data = buffer.data.float()  # as when a folder is loaded: what balances experts by a bias
    use_names_of(model, file_of_each_tensor(local_folder(str(args.model_name_or_path))))
    return model.to(device)


class HfForwardStrategy(DataParallelStrategy):
    """Forward passes of a plain Hugging Face model in the compute dtype; ranks share rows and nothing else."""

    def initialize(self, num_training_steps: int = 0) -> None:
        """Load the model. ValueError for optimizer steps; see also :func:`build_model`."""
        self._refuse_steps(num_training_steps)
        self.compute_dtype = DTYPES[self.role.model_args.dtype]
        self._load_model(self.compute_dtype)
        self.model.requires_grad_(False).eval().to(self.device)
