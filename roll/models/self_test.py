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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.config.roles import WorkerConfig
from roll.models.attention import HALF_PRECISION, has_varlen
from roll.models.build import DTYPES, HeadName, checked_config, eager_or_default, enable_gradient_checkpointing
from roll.models.expert_parallel import sum_of_parts
from roll.models.invariant import is_invariant, make_invariant
from roll.models.kernels import use_liger, use_products
from roll.models.layout_setup import dependent_rotaries, use_layout_attention
from roll.models.layouts import on_device, padded
from roll.models.log_probs import ResponseModel
from roll.models.self_test_rows import PADDED, Rows, rows_of
from roll.models.small import Divided, small_model
from roll.models.vision import reads_images
from roll.platforms import current_platform
from roll.protocol.vision import vision_token_ids

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# Up to this difference of log-probs or values in float32 it is rounding, which linear attention amplifies to 1e-3.
ROUNDING = 5e-3

# Difference of logits that is too large for rounding, and passes in which it is looked for.
NOISE = 1e-4
SEEDS = 4

# Errors of a forward pass whose code does not expect its input.
FAILURES = (RuntimeError, TypeError, AttributeError, KeyError, IndexError)

# They bring a role to a layout.
_KEYS = {
    "packed rows": ("use_remove_padding", "use_sequence_packing"),
    "shared prompts": ("use_prefix_sharing",),
}


def check_role(role: WorkerConfig, head: HeadName, trains: bool, context_group: ProcessGroup | None = None) -> Noise:
    """Collective over ``context_group``. Compare a small copy of the role's model with transformers.

    Args:
        context_group: ranks that share each row; they compute the copy too, on the group's device.

    Returns:
        The randomness to switch off in the model itself.

    Raises:
        ValueError: its results differ in a layout of the role; the message says which, by how much, and what would
            work.
    """
    begin, args = time.monotonic(), role.model_args
    where = f"{role.name}.model_args.model_name_or_path: {args.model_name_or_path}"
    config = checked_config(args, head)
    reads_images(config)  # refuses families whose towers are not known
    # Dropout that is written is wanted, and without a copy nothing tells it from other dropout.
    untried = Noise() if any("drop" in key for key in args.model_config_kwargs) else Noise(places=None)
    with torch.random.fork_rng(devices=[]):
        model = _copy_of(config, role, head)
        tried = None if model is None else _by_itself(model, head, trains)
        # Ranks that share rows must take the same path, or one would wait for another's part.
        if not agreed(tried is not None, context_group) or model is None or tried is None:
            logger.warning("%s: not self-tested, since no small copy of a %s model works", where, config.model_type)
            return untried
        untouched, noise, wanted = tried
        if noise is None:
            rule = "gives other log-probs in training than in evaluation without dropout and jitter, too"
            raise ValueError(f"{where}: this {config.model_type} model {rule}; use another family (Qwen, Llama ...)")
        if dependent_rotaries(model):
            context_group = None  # ranks that share rows know no lengths of rows; see set_row_lengths
        differences: dict[str, str | None] = {}
        for name in layouts_of(role):
            other = copy.deepcopy(untouched)
            noise.silence(other)
            # Where one rank alone raises, the others wait for it until the driver, which hears of it, ends them.
            try:
                differences[name] = _difference(other, role, head, name, trains, wanted, context_group)
            except (*FAILURES, ValueError) as error:
                differences[name] = f"fails with {type(error).__name__}: {error}"
            if context_group is not None and differences[name] is not None:
                break
    _judge(role, where, model, differences)
    logger.info(
        "%s: self-test of %s passed in %.2f s%s",
        where,
        ", ".join(differences),
        time.monotonic() - begin,
        f"; switched off: {', '.join(sorted(map('.'.join, noise.places or ())))}" if noise.places else "",
    )
    return noise


def layouts_of(role: WorkerConfig) -> list[str]:
    """Names in :data:`LAYOUTS`."""
    removes = role.use_remove_padding or role.use_sequence_packing
    return [*(["shared prompts"] if role.use_prefix_sharing else []), "packed rows" if removes else PADDED]


def use_own_operations(model: PreTrainedModel, role: WorkerConfig) -> None:
    """Replace the operations of ``model`` that the role's model computes in another way than transformers, in place."""
    if is_invariant(role.model_args):
        make_invariant(model)
        return
    if not role.model_args.compile:  # the compiler chooses products itself, and takes none of oneDNN's from others
        use_products(model)
    if role.model_args.use_liger_kernel:
        use_liger(model)
    if role.model_args.ulysses_size > 1:
        use_layout_attention(model, "model_args.ulysses_size")
        return
    keys = ("use_prefix_sharing", "use_sequence_packing", "use_remove_padding")
    if (key := next((key for key in keys if getattr(role, key)), None)) is not None:
        use_layout_attention(model, key)


def _copy_of(config: PretrainedConfig, role: WorkerConfig, head: HeadName) -> PreTrainedModel | None:
    """Build the copy, without the dropout that the user set: that is wanted, and not to be found as noise."""
    args = role.model_args
    for key in args.model_config_kwargs:
        if "drop" in key:
            setattr(config, key, 0.0)
    # Other kernels, such as flash attention's, need a GPU and half precision.
    implementation = eager_or_default(args, config)
    # 4 heads for each unit of width, which the ranks share evenly.
    width = next(width for width in count(1) if 4 * width % args.ulysses_size == 0)
    return small_model(config, head, implementation, args.trust_remote_code, Divided(width))


def agreed(holds: bool, group: ProcessGroup | None) -> bool:
    """Collective. Return True if ``holds`` on every rank of the group; None: this rank alone."""
    if group is None:
        return holds
    flag = torch.tensor(int(holds), device=current_platform().device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag)


def _by_itself(
    model: PreTrainedModel, head: HeadName, trains: bool
) -> tuple[PreTrainedModel, Noise | None, Computed] | None:
    """Another copy, what is to be switched off in the model (None: that does not do), and what transformers
    computes; None where the copy, whose sizes its family has never seen, cannot be computed at all."""
    untouched, quiet = copy.deepcopy(model), copy.deepcopy(model)
    noise: Noise | None = Noise()
    try:
        if trains:
            noise = Noise.of(model)
            noise.silence(quiet)
            # Many tokens: a router may draw only where two experts score nearly the same.
            ids = torch.randint(2, 62, (8, 24))
            with torch.no_grad():
                wanted = model(input_ids=ids, use_cache=False).logits
            noise = None if changes_in_training(quiet, ids, wanted) else noise
        return untouched, noise, plain_values(model, rows_of(model), head)
    except (*FAILURES, ValueError, StopIteration) as error:
        logger.debug("self-test: no copy of %s is computed: %r", model.config.model_type, error)
        return None


Computed = tuple[Tensor, Tensor | None]
"""float32 (B, L), and the gradient of the embeddings by a weighted sum of them."""


def plain_values(model: Any, rows: Rows, head: HeadName) -> Computed:
    """By the plain model, row by row."""
    values, excluded = torch.zeros(rows.ids.shape), list(vision_token_ids(model.config))
    for row in range(len(rows.ids)):
        keywords = rows.keywords(row, model.config)
        tokens = keywords["input_ids"]
        if head == "causal_lm":
            logits = model(**keywords, use_cache=False).logits[0, :-1].float()
            # Marks of images are never sampled.
            logits = logits.index_fill(1, torch.tensor(excluded, dtype=torch.int64), -torch.inf)
            found = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        else:
            found = model.score(model.base_model(**keywords, use_cache=False).last_hidden_state)[0, :-1, 0]
        values[row, 1 : tokens.shape[1]] = found
    values = torch.where(rows.mask, values, 0.0)
    return values.detach(), _gradient(model, values)


def _gradient(model: Any, values: Tensor) -> Tensor | None:
    model.zero_grad()
    weights = torch.linspace(0.5, 1.5, values.numel(), device=values.device).view_as(values)
    (values * weights).sum().backward()
    return model.get_input_embeddings().weight.grad


def _difference(
    model: PreTrainedModel,
    role: WorkerConfig,
    head: HeadName,
    name: str,
    trains: bool,
    wanted: Computed,
    group: ProcessGroup | None,
) -> str | None:
    """The difference of a layout, in words; None where there is none. ``model`` is changed as the role's own."""
    use_own_operations(model, role)
    if trains:
        enable_gradient_checkpointing(model, role.model_args)
        model.train()
    output = "log_probs" if head == "causal_lm" else "values"
    compute = partial(_in_layout, model, output, trains, group)
    device, dtype = current_platform().device(), DTYPES[role.model_args.dtype]
    # Ranks that share rows exchange them, and Liger's kernels run, on the device alone.
    values, gradient = compute(name, device if group is not None or role.model_args.use_liger_kernel else None)
    fault = difference_of(values, wanted[0], output)
    if fault is None and name != PADDED and dtype in HALF_PRECISION and has_varlen(device):
        for parameter in model.parameters():  # buffers, such as frequencies, stay as they are
            parameter.data = parameter.data.to(dtype)
        fault = _difference_of_kernels(partial(compute, device=device), name, output, wanted[0])
    if fault is not None:
        return fault
    if gradient is not None and wanted[1] is not None:
        relative = float((gradient - wanted[1]).norm() / wanted[1].norm())
        if not relative <= ROUNDING:
            return f"gives the right {output} and a gradient that is off by {relative:.0%}"
    return None


def _in_layout(
    model: PreTrainedModel,
    output: str,
    trains: bool,
    group: ProcessGroup | None,
    name: str,
    device: torch.device | None,
) -> Computed:
    """By the role's operations, on ``device``; None: where ``model`` is."""
    rows = rows_of(model)
    layout = rows.layout(name, model.config)
    if group is not None:
        sequences, length = layout.input_ids.shape
        layout = padded(layout, sequences, length + -length % group.size()).chunk(group.rank(), group.size())
        layout = replace(layout, context_group=group)
    if device is not None:
        layout = on_device(layout, device)
        torch.nn.Module.to(model, device)
    values = layout.scatter(ResponseModel(model)(layout, (output,))[output], rows.ids.shape)
    if group is not None:
        values = sum_of_parts(values, group)
    gradient = _gradient(model, values) if trains else None
    if group is not None and gradient is not None:
        dist.all_reduce(gradient, group=group)
    return values.detach().float().cpu(), None if gradient is None else gradient.cpu()


def _difference_of_kernels(compute: Callable[[str], Computed], name: str, output: str, wanted: Tensor) -> str | None:
    """The difference of half precision on a device, in words, where it is more than that of padded rows, which need no
    kernel of their own. The median over tokens: rounding alone sends some to other experts."""

    def off(layout: str) -> float:
        return float((compute(layout)[0] - wanted)[wanted != 0].abs().median())

    try:
        rounding = off(PADDED)
    except FAILURES:
        return None  # no layout's fault
    if (found := off(name)) <= 4 * rounding + ROUNDING:  # NaN is not
        return None
    return f"gives in half precision {output} that are off by {found:.3g}, in padded rows by {rounding:.3g}"


def difference_of(values: Tensor, wanted: Tensor, output: str) -> str | None:
    """Difference between outputs (3, T) of :func:`rows_of`, in words and figures; None where it is rounding."""
    off = (values - wanted).abs()
    if float(off.max()) <= ROUNDING:  # NaN is not
        return None
    row = int(off.max(1).values.argmax())
    tokens = wanted[row].nonzero()[:3, 0]
    figures = [" ".join(f"{value:.2f}" for value in part[row, tokens].tolist()) for part in (values, wanted)]
    return f"gives {output} that are off by up to {float(off.max()):.3g} ({figures[0]} for {figures[1]})"


def _judge(role: WorkerConfig, where: str, model: PreTrainedModel, differences: Mapping[str, str | None]) -> None:
    wrong = {name: text for name, text in differences.items() if text is not None}
    if not wrong:
        return
    name, text = next(iter(wrong.items()))
    changed = changed_logits(model)
    keys = [key for key in _KEYS.get(name, ()) if getattr(role, key)]
    if role.model_args.use_liger_kernel:
        remedy = "set model_args.use_liger_kernel: false, to see whether it is Liger's kernels"
    elif changed is not None:
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
def changed_logits(model: PreTrainedModel) -> str | None:
    """Difference of the model's logits from its output matrix's, in words; None where there is none."""
    head = model.get_output_embeddings()
    if head is None:
        return None
    ids = rows_of(model).ids[2:]
    logits = model(input_ids=ids, use_cache=False).logits
    try:
        of_matrix = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    except FAILURES as error:
        return f"its output matrix does not take the body's hidden states ({type(error).__name__}: {error})"
    off = float((logits.log_softmax(-1) - of_matrix.log_softmax(-1)).abs().max())
    return f"its logits are changed after the output matrix (log-probs by up to {off:.3g})" if off > ROUNDING else None


Place = tuple[str, str]
"""The class of a module, and its attribute: a number, or a module of dropout."""


@dataclass(frozen=True)
class Noise:
    """Places of randomness in training (dropout, jitter of routers), to be switched off where its probabilities are.

    A policy must give the same probabilities in every pass, or the on-policy ratio is not 1.  Randomness without such a
    probability (an expert drawn where its score ties) shows in a small copy in training mode, and the model is refused.
    """

    places: frozenset[Place] | None = frozenset()
    """By class, so that it is found in a model whose copy was looked at; None: everything."""

    @classmethod
    def of(cls, model: nn.Module) -> Noise:
        return cls(frozenset(place for place, _, _ in _probabilities(model)))

    def silence(self, model: nn.Module) -> None:
        """Switch it off in ``model``, in place; the dropout of adapters stays."""
        for place, module, attribute in _probabilities(model):
            if self.places is None or place in self.places:
                setattr(module, attribute, 0.0)


def _probabilities(model: nn.Module) -> Iterator[tuple[Place, nn.Module, str]]:
    """Every number above 0 by which ``model`` is random, with the module and the attribute that hold it."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        for attribute, value in list(vars(module).items()):
            if isinstance(value, float) and value > 0 and ("drop" in attribute or "jitter" in attribute):
                yield (kind, attribute), module, attribute
        for child, inner in module.named_children():
            if isinstance(inner, nn.Dropout) and inner.p > 0 and "lora_" not in name:
                yield (kind, child), inner, "p"


@torch.no_grad()
def changes_in_training(model: nn.Module, input_ids: Tensor, wanted: Tensor) -> bool:
    """True where the logits in training mode are not always ``wanted``; ``model`` is left in evaluation mode.

    Args:
        input_ids: int64 (S, T).
        wanted: float (S, T, V).
    """
    model.train()
    found = False
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        logits = model(input_ids=input_ids, use_cache=False).logits
        found = found or not torch.allclose(logits, wanted, rtol=0, atol=NOISE)
    model.eval()
    return found
