"""Start-up of a large prompt set: cold, from prepared rows on disk, and compared with ``datasets.map`` in one process.

Each measurement runs in a process of its own, so that its peak memory is its own; the memory of the imports and of the
tokenizer is measured apart.  ``python benchmarks/data.py [--rows 100000] [--text FILE]``
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LENGTH = 512
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = 4000
"""Of the made-up language, where no text is given."""


def questions(text: Path | None, count: int) -> Iterator[str]:
    """``count`` different questions of about 45 words: those of ``text`` (rows with ``question``) or made-up ones."""
    generator = random.Random(0)
    if text is None:
        words = ["".join(generator.choices("aeioubdfgklmnprst", k=generator.randint(2, 9))) for _ in range(WORDS)]
        for number in range(count):
            yield f"{number} {' '.join(generator.choices(words, k=generator.randint(20, 70)))}?"
        return
    known = [json.loads(line)["question"] for line in text.read_text().splitlines()]
    for number in range(count):
        yield f"{number}. {known[number % len(known)]}"


def write_rows(path: Path, text: Path | None, count: int) -> None:
    with path.open("w") as file:
        for number, question in enumerate(questions(text, count)):
            messages = [{"role": "user", "content": question}]
            row = {"id": str(number), "tag": "math", "messages": messages, "ground_truth": str(number)}
            file.write(json.dumps(row) + "\n")


def write_tokenizer(folder: Path, text: Path | None) -> None:
    """A byte-level BPE tokenizer of 8,192 tokens, as those of real models are."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    inner = ByteLevelBPETokenizer()
    inner.train_from_iterator(questions(text, 5000), vocab_size=8192, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def nothing(folder: Path, file: Path) -> int:
    import pyarrow  # noqa: F401

    import roll.datasets  # noqa: F401

    load_tokenizer(folder)
    return 0


def with_roll(folder: Path, file: Path) -> int:
    """Up to the first batch of prompts."""
    return first_batch(folder, file, cache=folder / "cache")


def with_processes(folder: Path, file: Path) -> int:
    """The same, shared out among as many processes as there are cores."""
    cores = len(os.sched_getaffinity(0))
    return first_batch(folder, file, cache=folder / "shared", preprocessing_num_workers=cores)


def uncached(folder: Path, file: Path) -> int:
    """The same, kept in memory."""
    return first_batch(folder, file)


def first_batch(folder: Path, file: Path, cache: Path | None = None, **options: Any) -> int:
    from roll.config.roles import DataArguments
    from roll.datasets import DomainSampler, PromptDataset

    os.environ["ROLL_CACHE_DIR"] = str(cache)
    data_args = DataArguments(file_name=str(file), use_cache=cache is not None, **options)
    dataset = PromptDataset.build(data_args, load_tokenizer(folder), LENGTH, {"math": ["math"]})
    DomainSampler(dataset.by_domain()).next_batch(128)
    return len(dataset)


def with_datasets(folder: Path, file: Path) -> int:
    """The usual way: ``load_dataset``, ``map`` with the chat template, ``filter`` by length, shuffled."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(folder)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
        return {"text": text, "token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}

    found = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "hf"))
    found = found.map(encode).filter(lambda row: len(row["token_ids"]) <= LENGTH).shuffle(seed=0)
    for number in range(128):
        found[number]
    return len(found)


def through_datasets(folder: Path, file: Path, processes: int | None = None) -> int:
    """This project's reader and row maker under ``datasets``: its generator, ``map`` in batches, Arrow cache."""
    import datasets
    import pyarrow

    from roll.config.roles import DataArguments
    from roll.datasets.columns import Columns
    from roll.datasets.making import PromptMaker
    from roll.datasets.preparation import CHUNK, cache_key, cache_settings
    from roll.datasets.reading import SourceRow, data_files, stream_rows
    from roll.datasets.store import INDEX, ROWS, StoredRow, from_json, to_json
    from roll.datasets.templates import Renderer, TemplateChoice
    from roll.datasets.types import BadRows

    datasets.disable_progress_bars()
    data_args, paths = DataArguments(file_name=str(file)), data_files(str(file))
    renderer = Renderer(load_tokenizer(folder), TemplateChoice.of_settings(data_args, None, None))
    maker = PromptMaker(data_args, renderer, LENGTH, domains={"math": ["math"]})
    settings = cache_settings(maker)
    assert settings is not None, "the tokenizer is a fast one"
    key = cache_key(paths, settings)
    names = [name for name in StoredRow.__slots__ if name != "position"]
    schema = {**{field.name: field for field in INDEX}, **{field.name: field for field in ROWS}}

    def read() -> Iterator[dict[str, Any]]:
        yield from ({"number": source.number, "row": to_json(source.row)} for source in stream_rows(paths))

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        numbered = zip(batch["number"], batch["row"], strict=True)
        rows = maker.make([SourceRow(paths[0], number, from_json(row)) for number, row in numbered], BadRows().report)
        return {name: [to_json(row.row) if name == "row" else getattr(row, name) for row in rows] for name in names}

    raw = datasets.Dataset.from_generator(read, cache_dir=str(folder / f"read{processes}"), fingerprint=key)
    maker.columns = Columns.of(data_args, SourceRow(paths[0], 1, from_json(raw[0]["row"])))
    features = datasets.Features.from_arrow_schema(pyarrow.schema([schema[name] for name in names]))
    made = raw.map(
        encode,
        batched=True,
        batch_size=CHUNK,
        num_proc=processes,
        remove_columns=raw.column_names,
        features=features,
        new_fingerprint=key[::-1],
        cache_file_name=str(folder / f"made{processes}.arrow"),
    )
    for name in ("id", "domain"):
        made.data[name].to_numpy()
    for number in range(128):
        made[number]
    return len(made)


def through_datasets_in_processes(folder: Path, file: Path) -> int:
    return through_datasets(folder, file, len(os.sched_getaffinity(0)))


def measured(work: Callable[[Path, Path], int], folder: Path, file: Path) -> tuple[float, float, float, int]:
    """Seconds and CPU-seconds (of all processes; imports excluded, but that of ``datasets``), peak memory of the first
    one in MiB, rows."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_measure, args=(work, folder, file, queue))
    process.start()
    result: tuple[float, float, float, int] = queue.get()
    process.join()
    return result


def _measure(work: Callable[[Path, Path], int], folder: Path, file: Path, queue: Any) -> None:
    nothing(folder, file)
    begin, cpu_begin = time.perf_counter(), cpu_time()
    rows = work(folder, file)
    seconds, cpu_seconds = time.perf_counter() - begin, cpu_time() - cpu_begin
    queue.put((seconds, cpu_seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, rows))


def cpu_time() -> float:
    """Seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--only", default="", help="the contestants with this word in their name")
    parser.add_argument("--text", type=Path, help="a JSONL file with questions, such as GSM8K's train.jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), Path(name) / "rows.jsonl"
        write_tokenizer(folder, options.text)
        write_rows(file, options.text, options.rows)
        print(f"{options.rows:,} rows, {file.stat().st_size / 2**20:.0f} MiB")
        print(f"{'':<36}{'seconds':>9}{'CPU-s':>9}{'peak MiB':>10}{'above imports':>15}{'rows':>10}")
        _, _, base, _ = measured(nothing, folder, file)
        cases: list[tuple[str, Callable[[Path, Path], int]]] = [
            ("roll, cold", with_roll),
            ("roll, prepared rows found", with_roll),
            ("roll, cold, a process for each core", with_processes),
            ("roll, in memory", uncached),
            ("same rows by datasets, cold", through_datasets),
            ("same rows by datasets, found", through_datasets),
            ("same rows by datasets, processes", through_datasets_in_processes),
            ("datasets.map row by row, cold", with_datasets),
            ("datasets.map row by row, found", with_datasets),
        ]
        for title, work in (case for case in cases if options.only in case[0]):
            seconds, cpu_seconds, peak, rows = measured(work, folder, file)
            print(
                f"{title:<36}{seconds:>9.1f}{cpu_seconds:>9.1f}{peak:>10.0f}{peak - base:>15.0f}{rows:>10,}", flush=True
            )


if __name__ == "__main__":
    main()
