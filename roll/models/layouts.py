"""Layouts of a micro-batch's rows for the model, and the places of the computed values.

A batch has one row a sample: ``[prompt | response | padding]``.  A layout says which token ids the model really gets,
which hidden state predicts which response token, and where in the batch the result is written.  A layout also says
where in the batch each of its tokens is, so that what belongs to a token (positions of several axes, features of an
image: :mod:`roll.models.vision`) follows it into any of them.  Three layouts are here:

* :func:`row_layout`: the rows as they are, without the columns that predict nothing;
* :func:`packed_layout`: the rows' own tokens one after another, each row seeing itself only;
* :func:`shared_prompt_layout`: adjacent rows with the same prompt become ``[prompt | response 1 | response 2 | ...]``,
  in which each response sees the prompt and itself only, at the positions it would have after its own copy of the
  prompt.  Log-probs and gradients are the same, the prompt is computed once, and no padding is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class _OnDevice:
    def to(self, device: torch.device) -> Self:
        """A copy on ``device``; itself where it is there already."""
        moved: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, torch.Tensor | _OnDevice):
                moved[item.name] = value.to(device)
            elif isinstance(value, tuple) and value and isinstance(value[0], _OnDevice):
                moved[item.name] = tuple(one.to(device) for one in value)
        return replace(self, **moved)


@dataclass(frozen=True)
class PromptParts(_OnDevice):
    """A flat run of N tokens as G prompts (padded to P) and B response parts (padded to R), for attention.

    Indices of padding point at token 0: harmless, since its result is discarded.
    """

    prompts: Tensor
    """int64 (G, P), indices into the N tokens."""
    parts: Tensor
    """int64 (B, R), indices into the N tokens."""
    prompt_of_part: Tensor
    """int64 (B,)."""
    part_mask: Tensor
    """bool (B or 1, 1, R, P + R): what a response token may see of its prompt and of its own part."""
    restore: Tensor
    """int64 (N,), the place of each token in the prompts followed by the parts, both flattened."""
    lengths: tuple[tuple[int, ...], ...]
    """Lengths of each prompt and the parts that follow it, in the order of the N tokens, which are their sum."""

    def padded(self, count: int) -> PromptParts:
        """With ``count`` padding tokens, whose results are discarded."""
        if not count:
            return self
        return replace(self, restore=pad(self.restore, (0, count)), lengths=(*self.lengths, (count,)))


@dataclass(frozen=True)
class PackedSequences(_OnDevice):
    """A flat run of N tokens as sequences that follow one another and do not see each other."""

    lengths: tuple[int, ...]
    """Tokens of each; their sum is N."""
    offsets: Tensor
    """int32 (sequences + 1,), where each begins, and N."""

    def padded(self, count: int) -> PackedSequences:
        """With ``count`` more tokens, a sequence of their own."""
        total = self.offsets[-1:] + count
        return PackedSequences((*self.lengths, count), torch.cat([self.offsets, total])) if count else self


AttentionPattern = PromptParts | PackedSequences
"""Attention pattern of a flat run of tokens: which tokens see which."""


@dataclass(frozen=True)
class ImageTokens(_OnDevice):
    """The placeholder tokens of a layout, replaced by features of images. Each distinct image is included once."""

    pixel_values: Tensor
    """float32 (patches, patch_dim), of I images, one after another."""
    grids: Tensor
    """int64 (I, 3): frames, rows and columns of patches of each."""
    lengths: Tensor
    """int64 (I,): features of each."""
    tokens: Tensor
    """int64 (V,), ascending indices into the flattened (S * T) tokens."""
    features: Tensor
    """int64 (V,): the feature of each, counted through all images."""

    def part(self, kept: Tensor, tokens: Tensor) -> ImageTokens | None:
        """Some of the tokens (bool (V,)) at other indices, and the images that they need; None without any.

        Args:
            tokens: int64, the new indices of those that are kept.
        """
        if not len(tokens):
            return None
        features = self.features[kept]
        images = torch.arange(len(self.lengths), device=features.device)
        owners = images.repeat_interleave(self.lengths)
        used = torch.zeros_like(images, dtype=torch.bool)
        used[owners[features]] = True
        if bool(used.all()):
            return replace(self, tokens=tokens, features=features)
        return ImageTokens(
            pixel_values=self.pixel_values[used.repeat_interleave(self.grids.prod(1))],
            grids=self.grids[used],
            lengths=self.lengths[used],
            tokens=tokens,
            features=(used[owners].cumsum(0) - 1)[features],
        )


@dataclass(frozen=True)
class TopTokens:
    """The most probable tokens of each distribution are wanted."""

    count: int
    limit: int
    """Only ids below this are among them."""


@dataclass(frozen=True)
class TargetDistributions(_OnDevice):
    """Target distributions of N tokens, and the comparison with them."""

    name: str
    """Begins the names of the outputs."""
    ids: Tensor
    """int64 (N, k), its most probable tokens, the first of them first."""
    log_probs: Tensor
    """(N, k)."""
    tail: Tensor
    """(N,), log-prob of all other tokens together."""
    temperature: float
    """Divides the model's logits before the comparison."""
    divergence: Callable[[Tensor, Tensor, bool], Tensor]
    """From log-probs (n, C) of the model and of the target to (n,); true where the last bucket is the tail."""

    def at(self, own: Tensor | slice) -> TargetDistributions:
        """Those of some tokens: bool (N,) or indices, or a slice."""
        return replace(self, ids=self.ids[own], log_probs=self.log_probs[own], tail=self.tail[own])


@dataclass(frozen=True)
class TokenLayout(_OnDevice):
    """Input of the model for one micro-batch of B rows and length L: S sequences of length T."""

    input_ids: Tensor
    """int64 (S, T)."""
    position_ids: Tensor | None
    """int64 (S, T), or None for 0..T-1 in every sequence; (3, S, T) where a model counts frames, rows and columns."""
    pattern: AttentionPattern | None
    """Attention pattern; None: every token sees what is before it in its sequence."""
    predictors: Tensor
    """int64 (N,), indices into the flattened (S * T) hidden states: the one that predicts each response token."""
    targets: Tensor
    """int64 (N,), the response tokens themselves."""
    destinations: Tensor
    """int64 (N,), indices of the response tokens in the flattened (B * L) batch."""
    sources: Tensor
    """int64 (S, T), index of each token in the flattened (B * L) batch; -1: no result depends on it."""
    num_padding: int
    """Number of the S * T tokens that no result depends on."""
    routes: Tensor | None = None
    """int64 (S, T, layers, k), experts that tokens are to go to (:mod:`roll.models.routes`); None: as routers say."""
    token_rows: Tensor | None = None
    """float32 (S, T), how many rows share each token; set by :func:`with_token_rows`."""
    images: ImageTokens | None = None
    """None: no token is a placeholder of an image."""
    top_tokens: TopTokens | None = None
    """None: they are not wanted."""
    comparisons: tuple[TargetDistributions, ...] = ()
    """Those that the response tokens' distributions are compared with."""

    def scatter(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Put (N, ...) values at their places in a (B, L, ...) tensor of zeros; gradients flow back to ``values``."""
        rest = values.shape[1:]
        flat = values.new_zeros(shape.numel(), *rest)
        if rest:
            return flat.index_copy(0, self.destinations, values).view(*shape, *rest)
        return flat.scatter(0, self.destinations, values).view(shape)

    def chunk(self, rank: int, ranks: int) -> TokenLayout:
        """Columns of this rank of ``ranks`` that share the sequences (T a multiple of them), and what they predict.

        The pattern stays that of the whole.
        """
        sequences, length = self.input_ids.shape
        width = length // ranks
        assert width * ranks == length, (length, ranks)
        columns = slice(rank * width, (rank + 1) * width)
        sequence, column = self.predictors // length, self.predictors % length
        own = (column >= columns.start) & (column < columns.stop)
        positions = self.position_ids
        if positions is None:
            positions = torch.arange(length, device=self.input_ids.device).expand(sequences, -1)
        images = self.images
        if images is not None:
            row, at = images.tokens // length, images.tokens % length
            kept = (at >= columns.start) & (at < columns.stop)
            images = images.part(kept, (row * width + at - columns.start)[kept])
        return replace(
            self,
            input_ids=self.input_ids[:, columns],
            position_ids=positions[..., columns],
            sources=self.sources[:, columns],
            images=images,
            predictors=(sequence * width + column - columns.start)[own],
            targets=self.targets[own],
            destinations=self.destinations[own],
            comparisons=tuple(target.at(own) for target in self.comparisons),
            routes=None if self.routes is None else self.routes[:, columns],
            token_rows=None if self.token_rows is None else self.token_rows[:, columns],
        )


def with_token_rows(layout: TokenLayout) -> TokenLayout:
    """With ``token_rows``: 0 for padding, the number of its responses for a token of a shared prompt, 1 for others.

    Sums weighted by it are the same in every layout of the same rows.
    """
    sequences, length = layout.input_ids.shape
    pattern, place = layout.pattern, torch.arange(sequences * length, device=layout.input_ids.device)
    if pattern is None:
        # The last hidden state that predicts something; what comes after it is padding.
        last = place.new_full((sequences,), -1)
        last = last.scatter_reduce(0, layout.predictors // length, layout.predictors % length, "amax")
        return replace(layout, token_rows=(place.view(sequences, length)[:1] <= last[:, None]).float())
    rows = (place < layout.input_ids.numel() - layout.num_padding).float()
    if isinstance(pattern, PromptParts):
        num_prompts, width = pattern.prompts.shape
        responses = torch.bincount(pattern.prompt_of_part, minlength=num_prompts)
        prompt = (pattern.restore // width).clamp_(max=num_prompts - 1)
        rows *= torch.where(pattern.restore < pattern.prompts.numel(), responses[prompt], 1)
    return replace(layout, token_rows=rows.view(sequences, length))


def row_layout(input_ids: Tensor, response_mask: Tensor, width_multiple: int = 1) -> TokenLayout:
    """Lay out the rows unchanged. Right padding needs no mask: under causal attention nothing before it sees it.

    Args:
        input_ids: int64 (B, L), right-padded.
        response_mask: bool (B, L); its first column is ignored (nothing predicts the first token).
        width_multiple: T is rounded up to a multiple of this, so that fewer different shapes are computed.
    """
    # Column t - 1 predicts token t; what comes after the last predictor need not be computed.
    rows, columns = response_mask[:, 1:].nonzero(as_tuple=True)
    length = input_ids.shape[1]
    width = int(columns.max()) + 1 if len(columns) else 1
    width += -width % width_multiple
    ids = input_ids[:, :width] if width <= length else pad(input_ids, (0, width - length))
    last = _last_responses(response_mask)[:, None]
    place = torch.arange(width, device=ids.device)
    starts = torch.arange(len(ids), device=ids.device)[:, None] * length
    return TokenLayout(
        input_ids=ids,
        position_ids=None,
        pattern=None,
        predictors=rows * width + columns,
        targets=input_ids[rows, columns + 1],
        destinations=rows * length + columns + 1,
        num_padding=ids.numel() - int(last.sum()),
        sources=torch.where(place < last, starts + place, -1),
    )


def packed_layout(input_ids: Tensor, response_mask: Tensor) -> TokenLayout:
    """Lay out the rows without padding, one after another in one flat run of tokens; positions restart with each row.

    Rows without a response token are left out.

    Args: as :func:`row_layout`.
    """
    last = _last_responses(response_mask)
    rows = last.nonzero()[:, 0]
    if not len(rows):  # a pass with nothing to predict, which other ranks' collectives need nevertheless
        return row_layout(input_ids[:1], response_mask[:1])
    lengths = last[rows]
    offsets = pad(lengths.cumsum(0), (1, 0))
    length = input_ids.shape[1]
    columns = torch.arange(length, device=input_ids.device)
    used = columns < lengths[:, None]
    start_of_row = torch.zeros_like(last)
    start_of_row[rows] = offsets[:-1]
    response_rows, response_columns = response_mask[:, 1:].nonzero(as_tuple=True)
    return TokenLayout(
        input_ids=input_ids[rows][used][None],
        position_ids=columns.expand_as(used)[used][None],
        pattern=PackedSequences(tuple(lengths.tolist()), offsets.int()),
        predictors=start_of_row[response_rows] + response_columns,
        targets=input_ids[response_rows, response_columns + 1],
        destinations=response_rows * length + response_columns + 1,
        sources=(rows[:, None] * length + columns)[used][None],
        num_padding=0,
    )


def padded(layout: TokenLayout, sequences: int, length: int) -> TokenLayout:
    """The layout padded to ``sequences`` of ``length`` tokens; no result depends on the new ones."""
    rows, width = layout.input_ids.shape
    if (rows, width) == (sequences, length):
        return layout
    extra = (0, length - width, 0, sequences - rows)
    flat = layout.pattern is not None
    assert min(extra) >= 0 and (not flat or rows == sequences == 1), (layout.input_ids.shape, sequences, length)
    positions, images = layout.position_ids, layout.images
    if images is not None:
        images = replace(images, tokens=_moved(images.tokens, width, length))
    return replace(
        layout,
        input_ids=pad(layout.input_ids, extra),
        position_ids=None if positions is None else pad(positions, extra),
        pattern=layout.pattern.padded(length - width) if layout.pattern is not None else None,
        predictors=_moved(layout.predictors, width, length),
        sources=pad(layout.sources, extra, value=-1),
        images=images,
        num_padding=layout.num_padding + sequences * length - rows * width,
    )


def _moved(indices: Tensor, width: int, length: int) -> Tensor:
    """Convert indices into flattened rows of ``width`` to indices into flattened rows of ``length``."""
    return indices // width * length + indices % width


def _last_responses(response_mask: Tensor) -> Tensor:
    """Return int64 (B,), the column of each row's last response token, which is also the number of tokens that have to
    be computed; 0 for a row without one (or whose first token is the only one)."""
    length = response_mask.shape[1]
    columns = torch.arange(length, device=response_mask.device)
    return torch.where(response_mask, columns, 0).amax(1)


def shared_prompt_layout(
    input_ids: Tensor,
    response_mask: Tensor,
    without_groups: Callable[[Tensor, Tensor], TokenLayout] = row_layout,
    prompt_keys: Tensor | None = None,
) -> TokenLayout:
    """Lay out adjacent rows with the same prompt after one copy of it, all in one flat run of tokens.

    A row's prompt is everything before its first response token; what follows (with several turns the environment's
    tokens too) is its response part.  Rows without a response token are left out.

    Args: as :func:`row_layout`; ``without_groups`` lays rows out of which no two share a prompt; ``prompt_keys``
        int64 (B, L) tells prompts apart where ids do not (they are the same for any image); None: the ids do.
    """
    response_mask = response_mask.clone()  # the caller's batch keeps its mask
    response_mask[:, 0] = False
    rows = response_mask.any(1).nonzero()[:, 0]
    ids, mask = input_ids[rows], response_mask[rows]
    length = ids.shape[1]
    columns = torch.arange(length, device=ids.device)
    first = mask.int().argmax(1)
    last = length - 1 - mask.flip(1).int().argmax(1)
    leads = _starts_a_prompt(ids if prompt_keys is None else prompt_keys[rows], first, columns)
    if bool(leads.all()):
        return without_groups(input_ids, response_mask)

    group = leads.cumsum(0) - 1
    in_prompt = columns < first[:, None]
    # The last response token predicts nothing, so a response part ends before it.
    used = (in_prompt & leads[:, None]) | (~in_prompt & (columns < last[:, None]))
    # slots[b, t]: the place of token t of row b among the tokens used; that of a shared prompt is with its first row.
    order = used.flatten().cumsum(0).view_as(ids) - 1
    leaders = leads.nonzero()[:, 0][group]
    slots = torch.where(in_prompt, order[leaders], order)

    row_index, column_index = mask.nonzero(as_tuple=True)
    return TokenLayout(
        input_ids=ids[used][None],
        position_ids=columns.expand_as(ids)[used][None],
        pattern=_prompt_parts(slots, used, leads, group, first, last),
        predictors=slots[row_index, column_index - 1],
        targets=ids[row_index, column_index],
        destinations=rows[row_index] * length + column_index,
        sources=(rows[:, None] * length + columns)[used][None],
        num_padding=0,
    )


def leads_a_group(input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """bool (B,): False for a row whose prompt is that of the row with a response before it, or that has no response.

    Args: as :func:`row_layout`; ids may be what tells prompts apart (``prompt_keys``).
    """
    rows = response_mask.any(1).nonzero()[:, 0]
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    leads = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    leads[rows] = _starts_a_prompt(input_ids[rows], response_mask[rows].int().argmax(1), columns)
    return leads


def _starts_a_prompt(ids: Tensor, first: Tensor, columns: Tensor) -> Tensor:
    """bool (B,): False for a row whose prompt, its tokens before ``first``, is that of the row before it."""
    starts = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    same_tokens = (ids[1:] == ids[:-1]) | (columns >= first[1:, None])
    starts[1:] = (first[1:] != first[:-1]) | ~same_tokens.all(1)
    return starts


def _prompt_parts(
    slots: Tensor, used: Tensor, leads: Tensor, group: Tensor, first: Tensor, last: Tensor
) -> PromptParts:
    """Divide the flat tokens into prompts and parts. ``slots`` and ``used`` are (B, L), the rest (B,)."""
    device = slots.device
    prompt_lengths, part_lengths = first[leads], last - first
    prompt_width, part_width = int(prompt_lengths.max()), max(1, int(part_lengths.max()))
    prompt_columns = torch.arange(prompt_width, device=device)
    part_columns = torch.arange(part_width, device=device)
    is_prompt = prompt_columns < prompt_lengths[:, None]
    is_part = part_columns < part_lengths[:, None]
    prompts = torch.where(is_prompt, slots[leads, :prompt_width], 0)
    part_source = (first[:, None] + part_columns).clamp_(max=slots.shape[1] - 1)
    parts = torch.where(is_part, slots.gather(1, part_source), 0)

    restore = torch.empty(int(used.sum()), dtype=torch.int64, device=device)
    restore[prompts[is_prompt]] = is_prompt.flatten().nonzero()[:, 0]
    restore[parts[is_part]] = is_part.flatten().nonzero()[:, 0] + is_prompt.numel()

    seen = is_prompt[group] if not bool(is_prompt.all()) else is_prompt[:1]
    own = torch.ones(part_width, part_width, dtype=torch.bool, device=device).tril()
    part_mask = torch.cat(
        [seen[:, None].expand(-1, part_width, -1), own.expand(len(seen), part_width, part_width)], dim=2
    )
    by_prompt = [[length] for length in prompt_lengths.tolist()]
    for prompt, length in zip(group.tolist(), part_lengths.tolist(), strict=True):
        by_prompt[prompt].append(length)
    return PromptParts(prompts, parts, group, part_mask[:, None], restore, tuple(map(tuple, by_prompt)))
