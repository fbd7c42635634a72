"""Self-test of a role's model at its start: a small copy of it, computed as the role does and as transformers does.

What a family computes is not known from its configuration: logits may be changed after the output matrix, layers may
not pass keywords on, rotary angles may depend on the longest row of a batch.  So rows of different length go through
:class:`~roll.models.log_probs.ResponseModel` in every layout of the role, in training mode, and each is compared with
the plain model's logits for that row alone.  Code that comes with a model is tested like any other.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.config.roles import WorkerConfig
from roll.models.attention import use_layout_attention
from roll.models.build import HeadName, attention_implementation, checked_config, enable_gradient_checkpointing
from roll.models.layouts import TokenLayout, packed_layout, row_layout, shared_prompt_layout
from roll.models.log_probs import ResponseModel
from roll.models.noise import Noise, find_noise
from roll.models.small import ORIGINAL_LENGTH, original_length, small_model
from roll.models.vision import reads_images

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

ROUNDING = 5e-3
"""Largest difference of a log-prob or a value in float32 that is none; linear attention amplifies rounding to 1e-3."""

_PROMPTS = (4, 4, 3)
_RESPONSES = (9, 3, 5)
_BEYOND = (9, 3, ORIGINAL_LENGTH + 1)
"""Where the configuration has an original length."""

FAILURES = (RuntimeError, TypeError, AttributeError, KeyError, IndexError)
"""Errors of a forward pass that is not made for what it is given."""

Layouts = Mapping[str, Callable[[Tensor, Tensor], TokenLayout]]
_PADDED = "padded rows"
LAYOUTS: Layouts = {
    _PADDED: lambda ids, mask: row_layout(ids, mask, 2 * ORIGINAL_LENGTH),
    "packed rows": packed_layout,
    "shared prompts": shared_prompt_layout,
}
_KEYS = {
    "packed rows": ("use_remove_padding", "use_sequence_packing"),
    "shared prompts": ("use_prefix_sharing",),
}
"""They bring a role to a layout."""


def check_role(role: WorkerConfig, head: HeadName, trains: bool) -> Noise:
    """Compare a small copy of the role's model with transformers.

    Returns:
        What is to be switched off in the model itself.

    Raises:
        ValueError: it is computed otherwise in a layout of the role; the message says which, by how much, and what
            would work.
    """
    begin, args = time.monotonic(), role.model_args
    where = f"{role.name}.model_args.model_name_or_path: {args.model_name_or_path}"
    config = checked_config(args, head)
    untried = Noise(by_name=not any("drop" in key for key in args.model_config_kwargs))
    if reads_images(config):
        # A tower's sizes depend on one another, so that no small copy is made of it.
        note_proved(where, config.model_type)
        return untried
    with torch.random.fork_rng(devices=[]):
        model = _copy_of(config, role, head)
        tried = None if model is None else _by_itself(model, head)
        if model is None or tried is None:
            logger.warning("%s: not self-tested, since no small copy of a %s model works", where, config.model_type)
            return untried
        untouched, noise, wanted = tried
        differences = {}
        for name in layouts_of(role):
            other = copy.deepcopy(untouched)
            noise.silence(other)
            differences[name] = _difference(other, role, head, name, trains, wanted)
    _judge(role, where, model, differences)
    logger.info(
        "%s: self-test of %s passed in %.2f s%s",
        where,
        ", ".join(differences),
        time.monotonic() - begin,
        f"; kept in evaluation mode: {', '.join(sorted(noise.pinned))}" if noise.pinned else "",
    )
    return noise


def note_proved(where: str, family: str) -> None:
    """Log that a family is not self-tested, since it is one of few that are taken at all."""
    logger.info("%s: not self-tested: the test suite compares the family %s with transformers", where, family)


def layouts_of(role: WorkerConfig) -> list[str]:
    """Names in :data:`LAYOUTS`."""
    removes = role.use_remove_padding or role.use_sequence_packing
    return [*(["shared prompts"] if role.use_prefix_sharing else []), "packed rows" if removes else _PADDED]


def uses_layout_attention(role: WorkerConfig) -> str | None:
    """The key that needs it."""
    if role.model_args.ulysses_size > 1:
        return "model_args.ulysses_size"
    keys = ("use_prefix_sharing", "use_sequence_packing", "use_remove_padding")
    return next((key for key in keys if getattr(role, key)), None)


def _copy_of(config: PretrainedConfig, role: WorkerConfig, head: HeadName) -> PreTrainedModel | None:
    """Dropout that the user wrote is not among what is found."""
    args = role.model_args
    for key in args.model_config_kwargs:
        if "drop" in key:
            setattr(config, key, 0.0)
    # Other kernels, such as flash attention's, want a GPU and half precision.
    implementation = "eager" if attention_implementation(args) == "eager" else None
    return small_model(config, head, implementation, args.trust_remote_code)


def _rows(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Ids int64 and response mask bool, (3, T); the first two rows share a prompt, and their lengths differ."""
    config = model.config.get_text_config().to_dict()
    scaled = original_length(config) is not None or config.get("max_position_embeddings") == ORIGINAL_LENGTH
    lengths = list(zip(_PROMPTS, _BEYOND if scaled else _RESPONSES, strict=True))
    width, random = max(map(sum, lengths)), torch.Generator().manual_seed(1)
    ids, mask = torch.randint(2, 62, (len(lengths), width), generator=random), torch.zeros(len(lengths), width)
    ids[1, : _PROMPTS[1]] = ids[0, : _PROMPTS[0]]
    for row, (prompt, response) in enumerate(lengths):
        ids[row, prompt + response :] = 0
        mask[row, prompt : prompt + response] = 1
    return ids, mask.bool()


def _by_itself(model: PreTrainedModel, head: HeadName) -> tuple[PreTrainedModel, Noise, Computed] | None:
    """Another copy, what is to be switched off in the model, and what transformers computes; None where the copy, whose
    sizes its family has never seen, cannot be computed at all."""
    untouched = copy.deepcopy(model)
    try:
        # Many tokens, since an expert may be drawn only where two are nearly as good.
        noise = find_noise(model, torch.randint(2, 62, (8, 24)))
        return untouched, noise, _plain(model, *_rows(model), head)
    except (*FAILURES, ValueError, StopIteration) as error:
        logger.debug("self-test: no copy of %s is computed: %r", model.config.model_type, error)
        return None


Computed = tuple[Tensor, Tensor | None]
"""float32 (B, L), and the gradient of the embeddings by a weighted sum of them."""


def _plain(model: Any, ids: Tensor, mask: Tensor, head: HeadName) -> Computed:
    """By the plain model, row by row."""
    values = torch.zeros(ids.shape)
    for row, own in enumerate(mask):
        length = int(own.nonzero()[-1]) + 1
        tokens = ids[row : row + 1, :length]
        if head == "causal_lm":
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
            found = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        else:
            found = model.score(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)[0, :-1, 0]
        values[row, 1:length] = found
    values = values * mask
    return values.detach(), _gradient(model, values)


def _gradient(model: Any, values: Tensor) -> Tensor | None:
    model.zero_grad()
    weights = torch.linspace(0.5, 1.5, values.numel()).view_as(values)
    (values * weights).sum().backward()
    gradient: Tensor | None = model.get_input_embeddings().weight.grad
    return gradient


def _difference(
    model: PreTrainedModel, role: WorkerConfig, head: HeadName, name: str, trains: bool, wanted: Computed
) -> str | None:
    """The fault of a layout, in words; None where there is none. ``model`` is changed as the role's own."""
    ids, mask = _rows(model)
    key = uses_layout_attention(role)
    if key is not None:
        use_layout_attention(model, key)
    if trains:
        enable_gradient_checkpointing(model, role.model_args)
        model.train()
    output = "log_probs" if head == "causal_lm" else "values"
    layout = LAYOUTS[name](ids, mask)
    try:
        values = layout.scatter(ResponseModel(model)(layout, (output,))[output], ids.shape)
        gradient = _gradient(model, values) if trains else None
    except (*FAILURES, ValueError) as error:
        return f"fails with {type(error).__name__}: {error}"
    off = (values.detach() - wanted[0]).abs()
    # not <=: NaN is a difference
    if not float(off.max()) <= ROUNDING:
        row = int(off.max(1).values.argmax())
        tokens = slice(_PROMPTS[row], _PROMPTS[row] + 3)
        figures = [" ".join(f"{value:.2f}" for value in part[row, tokens].tolist()) for part in (values, wanted[0])]
        return f"gives {output} that are off by up to {float(off.max()):.3g} ({figures[0]} for {figures[1]})"
    if gradient is not None and wanted[1] is not None:
        relative = float((gradient - wanted[1]).norm() / wanted[1].norm())
        if not relative <= ROUNDING:
            return f"gives the right {output} and a gradient that is off by {relative:.0%}"
    return None


def _judge(role: WorkerConfig, where: str, model: Any, differences: Mapping[str, str | None]) -> None:
    wrong = {name: text for name, text in differences.items() if text is not None}
    if not wrong:
        return
    name, text = next(iter(wrong.items()))
    changed = changed_logits(model)
    keys = [key for key in _KEYS.get(name, ()) if getattr(role, key)]
    if changed is not None:
        remedy = f"{changed}; megatron_train, or a family whose logits are its output matrix's (Qwen, Llama, Mistral)"
    elif keys:
        remedy = f"set {' and '.join(f'{key}: false' for key in keys)}"
    else:
        remedy = "use another family (Qwen, Llama, Mistral ...), for which this holds"
    raise ValueError(
        f"{where}: a small copy of this {model.config.model_type} model, computed in {name}, {text}, compared with "
        f"transformers row by row; {remedy}"
    )


@torch.no_grad()
def changed_logits(model: Any) -> str | None:
    """Difference of the model's logits from its output matrix's, in words; None where there is none."""
    head = model.get_output_embeddings()
    if head is None:
        return None
    ids = _rows(model)[0][:1]
    logits = model(input_ids=ids, use_cache=False).logits
    try:
        of_matrix = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    except FAILURES as error:
        return f"its output matrix does not take the body's hidden states ({type(error).__name__}: {error})"
    off = float((logits.log_softmax(-1) - of_matrix.log_softmax(-1)).abs().max())
    return f"its logits are changed after the output matrix (log-probs by up to {off:.3g})" if off > ROUNDING else None
