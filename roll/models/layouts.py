"""Layouts of a micro-batch's rows for the model, and the places of the computed values.

A batch has one row a sample: ``[prompt | response | padding]``.  A layout says which token ids the model really gets,
which hidden state predicts which response token, and where in the batch the result is written.  A layout also says
where in the batch each of its tokens is, so that what belongs to a token (positions of several axes, features of an
image: :mod:`roll.models.vision`) follows it into any of them.  Three layouts are here:

* :func:`row_layout`: the rows as they are, without the columns that predict nothing;
* :func:`packed_layout`: the rows' own tokens one after another, each row seeing itself only;
* :func:`tree_layout`: rows with a common beginning become a tree, such as ``[prompt | response 1 | response 2 | ...]``,
  in which each token sees what comes before it in its own rows, at the positions it has there.  Log-probs and gradients
  are the same, each common beginning is computed once, and no padding is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from roll.models.patterns import (
    AttentionPattern,
    PackedSequences,
    PrefixTree,
    common_beginnings,
    ends_of_responses,
    runs_of_rows,
    sharers,
)


@dataclass(frozen=True)
class ImageTokens:
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
class TargetDistributions:
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
class TokenLayout:
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
    """int64 (S, T, layers, k), experts that tokens are to go to (:mod:`roll.models.experts`); None: as routers say."""
    token_rows: Tensor | None = None
    """float32 (S, T), how many rows share each token; set by :func:`with_token_rows`."""
    images: ImageTokens | None = None
    """None: no token is a placeholder of an image."""
    top_tokens: TopTokens | None = None
    """None: they are not wanted."""
    comparisons: tuple[TargetDistributions, ...] = ()
    """Those that the response tokens' distributions are compared with."""
    context_group: ProcessGroup | None = None
    """Ranks that compute a :meth:`chunk` each; None: this rank computes all of it."""

    def scatter(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Put (N, ...) values at their places in a (B, L, ...) tensor of zeros; gradients flow back to ``values``."""
        rest = values.shape[1:]
        flat = values.new_zeros(shape.numel(), *rest)
        if rest:
            return flat.index_copy(0, self.destinations, values).view(*shape, *rest)
        return flat.scatter(0, self.destinations, values).view(shape)

    def within(self, rows: Sequence[int], length: int) -> TokenLayout:
        """The layout of a batch's ``rows`` (in its own columns, of which there are ``length``) as one of the batch."""
        places = torch.tensor(rows, device=self.sources.device)
        of_batch = lambda indices: places[indices // length] * length + indices % length  # noqa: E731
        sources = torch.where(self.sources < 0, -1, of_batch(self.sources))
        return replace(self, destinations=of_batch(self.destinations), sources=sources)

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


Part = TypeVar("Part", bound=TokenLayout | ImageTokens | TargetDistributions | PackedSequences | PrefixTree)


def on_device(part: Part, device: torch.device) -> Part:
    """A copy whose tensors, and those of the parts in it, are on ``device``."""
    moved: dict[str, Any] = {}
    for item in fields(part):
        value = getattr(part, item.name)
        if isinstance(value, Tensor):
            moved[item.name] = value.to(device)
        elif isinstance(value, ImageTokens | PackedSequences | PrefixTree):
            moved[item.name] = on_device(value, device)
    if isinstance(part, TokenLayout):
        moved["comparisons"] = tuple(on_device(one, device) for one in part.comparisons)
    return replace(part, **moved)


def with_token_rows(layout: TokenLayout) -> TokenLayout:
    """With ``token_rows``: 0 for padding, the number of the rows that share a token for one of a tree, 1 for others.

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
    if isinstance(pattern, PrefixTree):
        rows = pattern.rows.float()
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


def tree_layout(
    input_ids: Tensor,
    response_mask: Tensor,
    without_tree: Callable[[Tensor, Tensor], TokenLayout] = row_layout,
    prompt_keys: Tensor | None = None,
) -> TokenLayout:
    """Lay out each beginning that several rows have in common once, in one flat run of tokens.

    Such a beginning is the prompt of a group, or what :func:`~roll.models.patterns.common_beginnings` finds else: a
    response of one row may be part of the prompt of another.  Rows without a response token are left out.

    Args: as :func:`row_layout`; ``without_tree`` lays rows out of which no two share anything; ``prompt_keys``
        int64 (B, L) tells tokens apart where ids do not (they are the same for any image); None: the ids do.
    """
    # On the host: trees are built of Python numbers, once for a micro-batch.
    common = common_beginnings(input_ids if prompt_keys is None else prompt_keys, response_mask)
    if not common.any():
        return without_tree(input_ids, response_mask)
    mask = response_mask.clone()  # the caller's batch keeps its mask
    mask[:, 0] = False
    length, device = mask.shape[1], mask.device
    first, last = ends_of_responses(mask.cpu().numpy())
    parents, shared = sharers(common)
    only_prompts = all(not count or count == first[row] == first[parents[row]] for row, count in enumerate(shared))
    runs, paths = runs_of_rows(first, last, parents, shared, only_prompts)
    num_tokens = sum(run.length for run in runs)
    slots = np.zeros(mask.shape, dtype=np.int64)
    sources, row_lengths, rows = np.zeros((3, num_tokens), dtype=np.int64)
    # Backwards, so that the first of the rows that share a token is written last and stays.
    for row, path in reversed(list(enumerate(paths))):
        slots[row, : len(path)] = path
        sources[path] = row * length + np.arange(len(path))  # a shared token is that of the first of its rows
        row_lengths[path] = np.maximum(row_lengths[path], len(path) + 1)
        rows[path] += 1
    tree = PrefixTree(tuple(runs), torch.from_numpy(rows), torch.from_numpy(row_lengths), only_prompts)
    tree, place = on_device(tree, device), torch.from_numpy(sources).to(device)
    row_index, column_index = mask.nonzero(as_tuple=True)
    return TokenLayout(
        input_ids=input_ids.flatten()[place][None],
        position_ids=(place % length)[None],
        pattern=tree,
        predictors=torch.from_numpy(slots).to(device)[row_index, column_index - 1],
        targets=input_ids[row_index, column_index],
        destinations=row_index * length + column_index,
        sources=place[None],
        num_padding=0,
    )
