"""Prepared rows, prompts among them, and the order in which they are drawn: shuffled epochs, curricula, and domains
interleaved in fixed proportions. Exactly resumable."""

from __future__ import annotations

import hashlib
import math
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from roll.config.data import CurriculumArguments, DataArguments
from roll.datasets.forms import read_ground_truth
from roll.datasets.images import ImageReader
from roll.datasets.making import PromptMaker
from roll.datasets.preparation import load_rows
from roll.datasets.templates import Renderer, TemplateChoice
from roll.datasets.types import DataError, PromptRow
from roll.datasets.vision_model import VisionModel

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from roll.datasets.store import RowStore
    from roll.protocol.vision import VisionInputs


T = TypeVar("T")


class PreparedRows(Sequence[T]):
    """Prepared rows in file order, each built when it is read.

    Args:
        images: gives those of a row by its columns, prompt ids, file and number; None: the model sees none.
        positions: int64 (rows,), of the store's rows that belong to this set; None: all.
    """

    def __init__(
        self, store: RowStore, images: Callable[..., VisionInputs | None] | None, positions: np.ndarray | None = None
    ) -> None:
        import numpy as np

        self._store = store
        self._images = images
        self._positions = np.arange(len(store)) if positions is None else positions
        self.counts = store.counts

    @abstractmethod
    def _row(self, position: int) -> T:
        """The row at this position of the store."""

    def _vision(self, position: int, row: dict[str, Any], prompt_ids: Sequence[int]) -> VisionInputs | None:
        if self._images is None:
            return None
        store = self._store
        return self._images(row, prompt_ids, store.value("file", position), store.value("number", position))

    @property
    def ids(self) -> list[str]:
        """Ids of all rows, without building them."""
        return [str(name) for name in self._store.column("id")[self._positions]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of a row, responses included, int32 (rows,)."""
        return self._store.column("length")[self._positions]

    def digest(self) -> str:
        """Changes with any row's id, tokens or columns, and with their order."""
        hasher = hashlib.sha256(repr(self.ids).encode())
        hasher.update(self._store.column("digest")[self._positions].tobytes())
        return hasher.hexdigest()[:16]

    @property
    def difficulties(self) -> np.ndarray | None:
        """float64 (rows,); None without a curriculum."""
        values = self._store.column("difficulty")[self._positions]
        return None if (values != values).all() else values  # all are NaN

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self._row(int(position)) for position in self._positions[index]]
        return self._row(int(self._positions[index]))

    def __iter__(self) -> Iterator[T]:
        return (self._row(int(position)) for position in self._positions)


class PromptDataset(PreparedRows[PromptRow]):
    """Prompts in file order; draw from it with :class:`roll.datasets.DomainSampler`."""

    @classmethod
    def build(
        cls,
        data_args: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        prompt_length: int,
        domains: Mapping[str, Sequence[str] | None],
        *,
        global_template: str | None = None,
        tag_to_template: Mapping[str, str] | None = None,
        vision: VisionModel | None = None,
    ) -> PromptDataset:
        """Read ``data_args.file_name`` and keep the prompts of at most ``prompt_length`` tokens, or cut them to that.

        A validation set is built by a call of its own, with its own ``data_args`` and its own ``prompt_length``.

        Args:
            prompt_length: in tokens, template included.
            domains: ``tag_included`` of each reward section.
            global_template: instead of ``data_args.template``, for all rows.
            tag_to_template: instead of both, for rows of the given tags.
            vision: of a model that sees images.

        Raises:
            DataError: a file, row, template or tag that cannot be used, or no row left.
        """
        templates = TemplateChoice.of_settings(data_args, global_template, tag_to_template)
        images = ImageReader.of(data_args, vision)
        renderer = Renderer(tokenizer, templates)
        store, read_images = load_rows(PromptMaker(data_args, renderer, prompt_length, images, domains=domains))
        kept = store.counts.kept  # in the order of the files; from here on in that of the configuration
        store.counts = replace(store.counts, kept={domain: kept[domain] for domain in domains if domain in kept})
        return cls(store, read_images)

    def by_domain(self) -> dict[str, PromptDataset]:
        """The rows of each domain that has any, in file order."""
        domains = self._store.column("domain")[self._positions]
        return {
            domain: PromptDataset(self._store, self._images, self._positions[domains == domain])
            for domain in self.counts.kept
        }

    def tags(self) -> dict[str, int]:
        """Rows of each tag."""
        return dict(Counter(self._store.column("tag")[self._positions].tolist()))

    def _row(self, position: int) -> PromptRow:
        store = self._store
        row, token_ids = store.content("row", position), store.token_ids(position)
        return PromptRow(
            prompt_id=store.value("id", position),
            domain=store.value("domain", position),
            tag=store.value("tag", position),
            token_ids=token_ids,
            prompt_text=store.content("text", position),
            ground_truth=read_ground_truth(row),
            row=row,
            vision=self._vision(position, row, token_ids),
        )


@dataclass(frozen=True)
class EpochOrder:
    """The order of one domain's rows (or of a whole set's), determined by seed, name and epoch alone."""

    num_rows: int
    seed: int
    name: str = ""
    shuffle: bool = True
    curriculum: CurriculumArguments | None = None
    difficulties: Sequence[float] | np.ndarray | None = None  # (num_rows,), with a curriculum

    def of_epoch(self, epoch: int) -> list[int]:
        """Positions of the rows, each once."""
        # A text seed is hashed with SHA-512, so streams of different names and epochs are independent.
        generator = random.Random(f"{self.seed}/{self.name}/{epoch}")
        curriculum, bands = self.curriculum, [list(range(self.num_rows))]
        if curriculum is not None and epoch < curriculum.epochs:
            import numpy as np

            assert self.difficulties is not None, "a curriculum comes with difficulties"
            # Stable: rows of equal difficulty stay in the order of the files before they are shuffled.
            ranked = np.argsort(np.asarray(self.difficulties), kind="stable")
            bands = [part.tolist() for part in np.array_split(ranked, curriculum.bands)]
            bands = bands if curriculum.order == "easy_first" else bands[::-1]
        for band in bands if self.shuffle else ():
            generator.shuffle(band)
        return [row for band in bands for row in band]


class ShuffledEpochs(Generic[T]):
    """Endless passes over ``rows``; the order of each depends on seed, name and epoch alone. ``data_args`` says
    whether epochs are shuffled or follow a curriculum; None: shuffled. Raises ``DataError``: no rows."""

    def __init__(self, rows: Sequence[T], seed: int, name: str = "", data_args: DataArguments | None = None) -> None:
        if not rows:
            raise DataError(f"no rows to draw from{f' in domain {name!r}' if name else ''}")
        self._rows = rows
        self._digest = (
            rows.digest() if isinstance(rows, PreparedRows) else hashlib.sha256(repr(rows).encode()).hexdigest()
        )
        self._name = name
        how = (True, None) if data_args is None else (data_args.shuffle, data_args.curriculum)
        difficulties = rows.difficulties if isinstance(rows, PreparedRows) else None
        self._epochs = EpochOrder(len(rows), seed, name, *how, difficulties)
        self.num_drawn = 0  # rows drawn so far, over all epochs
        self._num_rows = len(rows)
        self.epoch = -1  # the epoch of the last row, counted from 0
        self._order: list[int] = []

    def next_row(self) -> T:
        epoch, place = divmod(self.num_drawn, self._num_rows)
        if self.epoch != epoch:
            self._order, self.epoch = self._epochs.of_epoch(epoch), epoch
        self.num_drawn += 1
        return self._rows[self._order[place]]

    def next_batch(self, size: int) -> list[T]:
        return [self.next_row() for _ in range(size)]

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; all but ``drawn`` must agree where the run continues."""
        order = self._epochs
        curriculum = None if order.curriculum is None else asdict(order.curriculum)
        settings = {"rows": order.num_rows, "seed": order.seed, "shuffle": order.shuffle, "curriculum": curriculum}
        return {"drawn": self.num_drawn, **settings, "contents": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken. Raises ``DataError``: the state belongs to other rows, another seed or
        another order."""
        mine = {key: value for key, value in self.state_dict().items() if key != "drawn"}
        theirs = {key: state.get(key) for key in mine}
        if mine != theirs:
            where = f"domain {self._name!r}: " if self._name else ""
            differing = [key for key in mine if mine[key] != theirs[key]]
            said = ", ".join(f"{key} {theirs[key]!r}, now {mine[key]!r}" for key in differing)
            raise DataError(
                f"{where}the checkpoint was drawing from other data ({said}): restore the rows and settings that it "
                "was written with, or start anew with resume_from_checkpoint: false"
            )
        self.num_drawn = int(state["drawn"])


class DomainSampler:
    """Prompts of several domains, interleaved so that the shares hold at every moment and not only on average.

    After n draws the count of a domain with share p differs from p*n by less than 1, whatever the batch sizes: the
    quota method of R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980), whose bound is
    1 - 1/(2k - 2) for k domains.  Shares are exact fractions, so nothing drifts.

    Args:
        datasets: the rows of each domain (:meth:`PromptDataset.by_domain`).
        probs: share of each domain (``domain_interleave_probs``), normalised to sum 1; a domain with share 0 is never
            drawn. None: in proportion to the number of rows.
        data_args: as :class:`ShuffledEpochs` takes it.

    Raises:
        DataError: a share without rows, rows without a share, or a share that is not a number >= 0.
    """

    def __init__(
        self,
        datasets: Mapping[str, Sequence[PromptRow]],
        probs: Mapping[str, float] | None = None,
        seed: int = 42,
        data_args: DataArguments | None = None,
    ) -> None:
        self._shares = shares(datasets, probs)
        drawn = [domain for domain, share in self._shares.items() if share]
        self._streams = {domain: ShuffledEpochs(datasets[domain], seed, domain, data_args) for domain in drawn}
        self._datasets = datasets
        self._rows_by_id: dict[str, dict[str, PromptRow]] = {}

    @property
    def num_drawn(self) -> int:
        return sum(stream.num_drawn for stream in self._streams.values())

    def counts(self) -> dict[str, int]:
        """Prompts drawn so far, by domain."""
        return {domain: stream.num_drawn for domain, stream in self._streams.items()}

    def next_batch(self, size: int) -> list[PromptRow]:
        """The next ``size`` prompts, domains interleaved. A prompt's id names its epoch (``id``, ``id@1`` ...),
        so every id is unique over the run."""
        rows = []
        for _ in range(size):
            domain = next(iter(self._streams))
            if len(self._streams) > 1:
                margin, turn = Fraction(1, 2 * len(self._streams) - 2), self.num_drawn + 1
                lacks = {name: self._shares[name] * turn - stream.num_drawn for name, stream in self._streams.items()}
                # Shares sum to 1, so some domain is below its quota, and may be drawn without running ahead of it.
                behind = [name for name in lacks if lacks[name] >= margin]
                # Earliest deadline first: after how many draws a domain would lack a whole row (Tijdeman, above).
                domain = min(behind, key=lambda name: (1 - margin - lacks[name]) / self._shares[name])
            stream = self._streams[domain]
            row = stream.next_row()
            rows.append(replace(row, prompt_id=f"{row.prompt_id}@{stream.epoch}") if stream.epoch else row)
        return rows

    def find(self, domain: str, prompt_id: str) -> PromptRow:
        """The prompt that was drawn under this id. Raises ``DataError``: the domain has no such row."""
        rows = self._rows_by_id.get(domain)
        if rows is None:
            rows = self._rows_by_id[domain] = {row.prompt_id: row for row in self._datasets.get(domain, ())}
        row = rows.get(prompt_id)
        if row is not None:
            return row
        own_id, _, epoch = prompt_id.rpartition("@")
        if own_id not in rows or not epoch.isdecimal():
            raise DataError(f"domain {domain!r} has no prompt {prompt_id!r}, which the checkpoint was at work on")
        return replace(rows[own_id], prompt_id=prompt_id)

    def state_dict(self) -> dict[str, Any]:
        """Position of every domain: plain JSON values."""
        return {
            "shares": {domain: str(share) for domain, share in self._shares.items()},
            "domains": {domain: stream.state_dict() for domain, stream in self._streams.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state`` was taken. Raises ``DataError``: the data or the domains' shares are not
        those of the state."""
        mine = self.state_dict()["shares"]
        if state["shares"] != mine:
            raise DataError(
                f"cannot continue the checkpoint's data order: domain_interleave_probs changed from {state['shares']} "
                f"to {mine}; restore the former setting, or start anew with resume_from_checkpoint: false"
            )
        for domain, stream in self._streams.items():
            stream.load_state_dict(state["domains"][domain])


def shares(datasets: Mapping[str, Sequence[PromptRow]], probs: Mapping[str, float] | None) -> dict[str, Fraction]:
    """The exact share of each domain; decimal numbers are taken as written (0.1 is one tenth)."""
    if probs is None:
        wanted = {domain: Fraction(len(rows)) for domain, rows in datasets.items() if rows}
    else:
        for domain, prob in probs.items():
            if not isinstance(prob, (int, float)) or not math.isfinite(prob) or prob < 0:
                raise DataError(f"domain_interleave_probs.{domain} = {prob!r}: must be a number >= 0, such as 0.5")
        wanted = {domain: Fraction(str(prob)) for domain, prob in probs.items()}
    missing = [domain for domain, share in wanted.items() if share and not datasets.get(domain)]
    if missing:
        present = ", ".join(f"{domain} ({len(rows)})" for domain, rows in datasets.items()) or "none"
        raise DataError(f"domain_interleave_probs.{missing[0]}: this domain has no rows; domains with rows: {present}")
    unshared = [domain for domain, rows in datasets.items() if rows and domain not in wanted]
    if unshared:
        raise DataError(
            f"domain_interleave_probs has no entry for {unshared[0]!r}, which has rows; give it a share or 0"
        )
    total = sum(wanted.values())
    if not total:
        raise DataError("domain_interleave_probs: no domain has a share above 0")
    return {domain: share / total for domain, share in wanted.items()}
