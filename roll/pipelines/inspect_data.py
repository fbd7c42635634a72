"""``roll inspect-data``: the rows of a configuration as the model will see them, with lengths and counts by domain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, groupby, pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from roll.config.loader import LoadedConfig
from roll.config.roles import DataArguments
from roll.datasets import DataError, LoadCounts, PromptDataset, PromptRow, SftRow
from roll.datasets.columns import Columns
from roll.datasets.forms import form_of
from roll.datasets.preferences import JudgedRow
from roll.datasets.reading import SourceRow, data_files, first_row
from roll.pipelines.files import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STYLES = {"content": "bold", "template": "cyan", "special": "magenta", "response": "green"}
BINS, BAR = 10, 40  # rows of a length histogram, and characters of its longest bar
PERCENTILES = (50, 95, 100)


def inspect_data(
    loaded: LoadedConfig[Any], console: Console, num_rows: int, only: str | None, row_id: str | None
) -> None:
    """Read all sets and show them.

    Args:
        num_rows: rows shown of each domain.
        only: the set to show: ``train``, ``validation``, or the name of a validation set; None: all.
        row_id: the one row to show; None: the first of each domain.

    Raises:
        DataError: the data cannot be used, or there is no such set or row.
    """
    arguments = loaded.plan.roles[loaded.pipeline.reading_role()].section.model_args
    tokenizer = load_tokenizer(arguments.model_name_or_path, arguments.trust_remote_code)
    painter = Painter(tokenizer)
    found = 0
    sets = loaded.pipeline.readable_sets(loaded)
    if only is not None and only not in sets:
        raise DataError(f"no set is called {only!r}; the sets are {', '.join(sets)}")
    for one in sets.values() if only is None else [sets[only]]:
        dataset = one.read(tokenizer)
        console.print(Rule(Text(one.name)))
        for path in data_files(one.data_args.file_name or []):
            if form := str(form_of(one.data_args, first_row(path))):
                console.print(Text(f"{path} is read as: {form}"))
        console.print(Text(str(dataset.counts)), counts_table(dataset.counts), sep="\n")
        for remark in one.remarks(dataset.counts):
            console.print(Text(remark, style="yellow"))
        # Rows without domains have one count, under the name of their pipeline.
        domains: Any = dict.fromkeys(dataset.counts.kept, dataset)
        if isinstance(dataset, PromptDataset):
            domains = dataset.by_domain()
        for domain, rows in domains.items():
            console.print(histogram(domain, rows.lengths, one.limit))
        if row_id is None:
            shown = [row for rows in domains.values() for row in rows[:num_rows]]
        else:
            shown = [dataset[i] for i, name in enumerate(dataset.ids) if name == row_id]
        found += len(shown)
        for row in shown:
            console.print(Group(header(row), painter(row, one.data_args), Text()))
    if row_id is not None and not found:
        raise DataError(f"no row has the id {row_id!r}")
    console.print(Text.assemble(*((f" {name} ", style) for name, style in STYLES.items())))


AnyRow = PromptRow | SftRow | JudgedRow


def counts_table(counts: LoadCounts) -> Table:
    """The fate of the rows: kept, or left out and why."""
    table = Table()
    for column in ("domain", "kept", "too long", "truncated"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for domain in dict.fromkeys((*counts.kept, *counts.too_long)):
        numbers = (counts.kept.get(domain, 0), counts.too_long.get(domain, 0), counts.truncated.get(domain, 0))
        table.add_row(Text(domain), *(f"{number:,}" for number in numbers))
    return table


def histogram(domain: str, lengths: np.ndarray, limit: int) -> Text:
    """Tokens of the rows that are kept, in at most ten bars of equal width."""
    percentiles = ", ".join(f"{p}%: {int(np.percentile(lengths, p))}" for p in PERCENTILES)
    text = Text(f"{domain}: tokens of a row, mean {lengths.mean():.0f}, {percentiles} (limit {limit})\n")
    low, high = int(lengths.min()), int(lengths.max())
    width = ceil((high - low + 1) / BINS)
    counts = np.bincount((lengths - low) // width)
    for i, count in enumerate(counts):
        bar = "█" * round(BAR * count / counts.max()) or ("▏" if count else "")
        text.append(f"  {low + i * width:>7} - {low + (i + 1) * width - 1:<7} {bar} {count:,}\n")
    return text


def header(row: AnyRow) -> Text:
    if isinstance(row, PromptRow):
        parts = [row.prompt_id, f"domain {row.domain}", f"tag {row.tag}", f"{len(row.token_ids)} tokens"]
        parts.append(f"ground truth {str(row.ground_truth)[:80]!r}")
    elif isinstance(row, JudgedRow):
        lengths = " | ".join(str(len(response)) for response in row.responses)
        parts = [row.row_id, f"{len(row.prompt_ids)} + {lengths} tokens"]
        if row.scores:
            parts.append(f"scores {' | '.join(f'{score:g}' for score in row.scores)}")
        if row.margin is not None:
            parts.append(f"margin {row.margin:g}")
    else:
        learned = sum(row.response_mask)
        parts = [row.row_id, f"{len(row.input_ids) - learned} + {learned} tokens"]
    return Text("  ".join(parts), style="reverse")


class Painter:
    """Colours a row's tokens, decoded: special tokens, what the data says, what the template adds, the response. Of
    demonstrations and preferences the row as read is not kept, so their prompts are of one colour."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = {int(number) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special |= set(tokenizer.all_special_ids)

    def __call__(self, row: AnyRow, data_args: DataArguments) -> Text:
        if isinstance(row, PromptRow):
            source = SourceRow(Path(row.prompt_id), 0, row.row)
            messages = Columns.of(data_args, source).read_messages(source)
            contents = [message["content"] for message in messages if isinstance(message["content"], str)]
            return self.paint(row.token_ids, contents, "template")
        if isinstance(row, JudgedRow):
            sides = [(row.prompt_ids, "content"), *((response, "response") for response in row.responses)]
            return Text("\n").join(self.paint(ids, (), style) for ids, style in sides)
        edges = [0, *(row.spans or (row.prompt_length, len(row.input_ids))), len(row.input_ids)]
        parts = [
            self.paint(row.input_ids[begin:end], (), style)
            for (begin, end), style in zip(pairwise(edges), cycle(("content", "response")))
        ]
        return Text().join(parts)

    def paint(self, token_ids: Sequence[int], contents: Sequence[str], rest: str) -> Text:
        """The text of ``token_ids``; where ``contents`` occur in it, in their order, it is the data's own."""
        text, special = "", []
        # Runs of plain tokens are decoded together: a character may need several.
        for is_special, run in groupby(token_ids, key=self._special.__contains__):
            piece = str(self._tokenizer.decode(list(run), skip_special_tokens=False))
            if is_special:
                special.append((len(text), len(text) + len(piece)))
            text += piece
        painted, position = Text(text), 0
        for content in contents:
            begin = text.find(content, position) if content else -1
            if begin >= 0:
                painted.stylize(STYLES[rest], position, begin)
                position = begin + len(content)
                painted.stylize(STYLES["content"], begin, position)
        painted.stylize(STYLES[rest], position)
        for begin, end in special:
            painted.stylize(STYLES["special"], begin, end)
        return painted
