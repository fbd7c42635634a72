"""Self-test of the engine at its start: prompts and cached decoding of a small copy, against plain passes by row."""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING

import torch

from roll.config.roles import WorkerConfig
from roll.models.build import DTYPES, eager_or_default
from roll.models.invariant import is_invariant, make_invariant
from roll.models.layouts import packed_layout, row_layout
from roll.models.log_probs import ResponseModel
from roll.models.self_test import FAILURES, ROUNDING, changed_logits
from roll.models.small import ORIGINAL_LENGTH, VOCABULARY, WINDOW, original_length, small_model
from roll.models.vision import reads_images
from roll.protocol.vision import vision_token_ids
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams
from roll.strategies.hf_infer.decoder import Decoder
from roll.strategies.hf_infer.engine import GenerationEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_PROMPTS = (5, 3, 1)  # rows of different length; with a fourth one, of padding

_OTHERS = "set strategy_args.strategy_name: vllm or sglang, or use another family (Qwen, Llama, Mistral ...)"


def check_engine(
    role: WorkerConfig, config: PretrainedConfig, max_model_len: int, make: Callable[[PreTrainedModel, int], Decoder]
) -> bool:
    """Compare a small copy of the model of ``config`` in an engine with transformers. ``make``: a decoder of a model,
    for so many tokens. True: the logits are known to be the output matrix's of the body's hidden states. Raises
    ValueError: log-probs that are other ones; see also ``make``."""
    begin, args = time.monotonic(), role.model_args
    reads_images(config)  # refuses families whose towers are not known
    where = f"{role.name}.model_args.model_name_or_path: {args.model_name_or_path}"
    with torch.random.fork_rng(devices=[]):
        model = small_model(config, "causal_lm", eager_or_default(args, config), args.trust_remote_code)
        if model is None:
            logger.warning("%s: not self-tested, since no small copy of a %s model works", where, config.model_type)
            return False
        plain, trained = copy.deepcopy(model), None
        try:
            if is_invariant(args):
                torch.nn.Module.to(model, DTYPES[args.dtype])
                make_invariant(model)
                trained = ResponseModel(copy.deepcopy(model))
            length = _length(config, model.config, max_model_len)
            outputs = _generated(make(model, length), length)
        except FAILURES as error:
            raise ValueError(
                f"{where}: hf_infer cannot decode a small copy of this model: {error!r}; {_OTHERS}"
            ) from error
        if trained is not None and (unequal := _unequal(trained, outputs)):
            raise ValueError(
                f"{where}: of {unequal} tokens of a small copy of this {config.model_type} model, the log-probs of "
                "hf_infer are not those of a trainer to the last bit; set strict_on_policy: false, or use another "
                "family (Qwen, Llama, Mistral)"
            )
        is_rounded = trained is not None and DTYPES[args.dtype] is not torch.float32
        off = 0.0 if is_rounded else max(_difference(plain, prompt, output) for prompt, output in outputs)
    if not off <= ROUNDING:  # nan as well
        raise ValueError(
            f"{where}: log-probs of a small copy of this {config.model_type} model, decoded with a cache by hf_infer, "
            f"are off by up to {off:.3g} from those of transformers, row by row; {_OTHERS}"
        )
    logger.info("%s: self-test of cached decoding passed in %.2f s", where, time.monotonic() - begin)
    return changed_logits(plain) is None


def _length(config: PretrainedConfig, small: PretrainedConfig, max_model_len: int) -> int:
    """Most tokens of a row of the copy: on the same side of a window and of the original length as the model's own."""
    text = config.get_text_config()
    window, original = getattr(text, "sliding_window", None), original_length(text.to_dict())
    length = 2 * ORIGINAL_LENGTH if original is None or max_model_len > original else ORIGINAL_LENGTH
    if window and max_model_len <= window:
        length = min(length, WINDOW)
    return min(length, getattr(small.get_text_config(), "max_position_embeddings", None) or length)


def _generated(decoder: Decoder, length: int) -> list[tuple[list[int], GenerationOutput]]:
    """Prompts, and what an engine with a row more than they need samples after them."""
    random = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, VOCABULARY - 2, (size,), generator=random).tolist() for size in _PROMPTS]
    engine = GenerationEngine(decoder, str, (), len(prompts) + 1, length)
    engine.add_requests(
        GenerationRequest(str(index), prompt, SamplingParams(length - len(prompt), seed=index))
        for index, prompt in enumerate(prompts)
    )
    outputs: list[GenerationOutput] = []
    while engine.num_unfinished:
        outputs += engine.step()
    return [(prompts[int(output.request_id)], output) for output in outputs]


@torch.no_grad()
def _unequal(model: ResponseModel, outputs: list[tuple[list[int], GenerationOutput]]) -> int:
    """Tokens whose log-probs differ from those of a trainer's pass over all rows in any bit: padded and packed."""
    sizes = [(len(prompt), len(prompt) + len(output.token_ids)) for prompt, output in outputs]
    ids = torch.zeros(len(sizes), max(end for _, end in sizes), dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    sampled = torch.zeros(ids.shape)
    for row, ((begin, end), (prompt, output)) in enumerate(zip(sizes, outputs, strict=True)):
        ids[row, :end] = torch.tensor([*prompt, *output.token_ids])
        mask[row, begin:end] = True
        sampled[row, begin:end] = torch.tensor(output.log_probs)
    layouts = (row_layout(ids, mask), packed_layout(ids, mask))
    found = [layout.scatter(model(layout, ("log_probs",))["log_probs"], ids.shape) for layout in layouts]
    return int(sum((values != sampled).sum() for values in found))


@torch.no_grad()
def _difference(model: PreTrainedModel, prompt: list[int], output: GenerationOutput) -> float:
    """Between the log-probs of a sample and those of one plain pass over prompt and response; each token is compared
    at the length that the row had when it was sampled."""
    worst, excluded = 0.0, list(vision_token_ids(model.config))
    for index, (token, found) in enumerate(zip(output.token_ids, output.log_probs, strict=True)):
        row = torch.tensor([prompt + output.token_ids[:index]])
        logits = model(input_ids=row, use_cache=False).logits[0, -1].float()
        logits[excluded] = -torch.inf
        worst = max(worst, abs(float(logits.log_softmax(-1)[token]) - found))
    # The engine has no end tokens here: a sample that ended early was not compared to its end.
    return worst if output.finish_reason == "length" else float("nan")
