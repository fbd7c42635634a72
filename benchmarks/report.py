"""Cost of recording samples, and of opening a report; and the picture of docs/report.md.

    python -m benchmarks.report                    # CPU time and size of the record of a step
    python -m benchmarks.report --open             # bytes and milliseconds of reports by number of samples (a browser)
    python -m benchmarks.report --picture RUN      # docs/images/report.png, of a run of the tiny example (a browser)
    python -m benchmarks.report --pictures         # docs/images/diagnosis.png and timeline.png, of recorded runs

The first and the third need the tiny example's artifacts; all but the first need the extra [browser], Chromium and its
driver.
The runs of ``--pictures`` are those that the tests diagnose (tests/report/records), so anybody can draw them again.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from roll.config.run import SampleLogConfig
from roll.pipelines.sample_records import SampleRecorder
from roll.protocol import DataProto
from roll.report.page import write_page
from roll.report.run_files import read_run
from roll.tracking.run_record import SampleLog

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples/tiny/artifacts/seed0/warm_start/model"
PICTURE = ROOT / "docs/images/report.png"
RECORDS = ROOT / "tests/report/records"
PICTURES = (("diagnosis", "one_text", "overview"), ("timeline", "async", "timeline"))
"""Name of the picture, recorded run, tab of the report."""
REPEATS = 7


def step_batch(groups: int, size: int, prompt: int, response: int, vocabulary: int) -> DataProto:
    """A training batch of groups of ``size`` with random tokens, as it is when a step is recorded."""
    generator = torch.Generator().manual_seed(0)
    rows, width = groups * size, prompt + response
    mask = torch.arange(width).expand(rows, width) >= prompt
    log_probs = torch.where(mask, -torch.rand(rows, width, generator=generator), 0.0)
    tensors = {
        "input_ids": torch.randint(0, vocabulary, (rows, width), generator=generator),
        "attention_mask": torch.ones(rows, width, dtype=torch.bool),
        "response_mask": mask,
        "rollout_log_probs": log_probs,
        "old_log_probs": log_probs + 1e-4 * torch.randn(rows, width, generator=generator),
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous(),
        "weight_versions": torch.zeros(rows, width, dtype=torch.int32),
        "scores": torch.rand(rows, generator=generator),
        "response_level_rewards": torch.rand(rows, generator=generator),
        "group_ids": torch.arange(groups).repeat_interleave(size),
    }
    texts = {
        "prompt_id": [f"row-{row // size}" for row in range(rows)],
        "domain": ["d"] * rows,
        "tag": ["t"] * rows,
        "finish_reason": ["stop"] * rows,
    }
    return DataProto.from_dict(tensors, non_tensors=texts)


def recording(groups: int, size: int, response: int) -> tuple[float, float, int]:
    """CPU seconds of the thread that a step waits for (median), of all threads, and bytes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    batch = step_batch(groups, size, 40, response, len(tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.jsonl"
        recorder = SampleRecorder(SampleLog(file, 1 << 40), SampleLogConfig())
        waits, times = [], []
        for step in range(REPEATS):
            begin, cpu = time.thread_time(), time.process_time()
            recorder.policy(step, batch, list, tokenizer, batch.batch["old_log_probs"])
            waits.append(time.thread_time() - begin)
            recorder.flush()
            times.append(time.process_time() - cpu)
        recorder.close()
        return median(waits), median(times), file.stat().st_size // REPEATS


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    from selenium import webdriver

    found = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    options = webdriver.ChromeOptions()
    options.binary_location = found
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1240,980"):
        options.add_argument(word)
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield session
    session.quit()


def opened(session: Any, file: Path) -> int:
    """Milliseconds by the browser's clock until the page is there."""
    session.get(file.resolve().as_uri())
    while not (shown := session.execute_script("return document.documentElement.dataset.ready")):
        time.sleep(0.02)
    return int(shown)


def opening() -> None:
    from tests.report.made_runs import made_block, made_run

    sys.stdout.write("| samples | tokens each | MB | opens in ms |\n|---|---|---|---|\n")
    with browser() as session, tempfile.TemporaryDirectory() as name:
        for samples, tokens in ((1_024, 64), (10_240, 64), (100_096, 64)):
            made = [made_block(0, 32, 8, tokens, random.Random(number)) for number in range(4)]
            blocks = (made[step % 4] | {"step": step} for step in range(samples // 256))
            run = made_run(Path(name) / f"run-{samples}-{tokens}", list(blocks))
            write_page([read_run(run)], run / "report.html", 10**6)
            shown = min(opened(session, run / "report.html") for _ in range(3))
            size = (run / "report.html").stat().st_size / 1e6
            sys.stdout.write(f"| {samples:,} | {tokens} | {size:.1f} | {shown} |\n")
            sys.stdout.flush()


def picture(run: Path) -> None:
    """The samples of a group with a right and a wrong response, in the last step but a few."""
    with browser() as session, tempfile.TemporaryDirectory() as name:
        file = Path(name) / "report.html"
        write_page([read_run(run)], file)
        opened(session, file)
        session.find_element("id", "tab-samples").click()
        time.sleep(0.5)
        head = session.find_elements("css selector", ".row.head span")
        next(column for column in head if column.text == "advantage").click()
        time.sleep(0.5)
        session.find_element("css selector", "#samples .row").click()
        time.sleep(0.5)
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        session.save_screenshot(str(PICTURE))
    _smaller(PICTURE)
    sys.stdout.write(f"{PICTURE}: {PICTURE.stat().st_size / 1e3:.0f} kB\n")


def pictures() -> None:
    """Tabs of the reports of recorded runs."""
    with browser() as session, tempfile.TemporaryDirectory() as name:
        for number, (picture_name, record, tab) in enumerate(PICTURES):
            folder = Path(name) / str(number) / record
            with tarfile.open(RECORDS / f"{record}.tar.xz") as archive:
                archive.extractall(folder, filter="data")
            file = folder / "report.html"
            write_page([read_run(folder)], file)
            opened(session, file)
            session.find_element("id", f"tab-{tab}").click()
            time.sleep(0.5)
            target = PICTURE.with_name(f"{picture_name}.png")
            session.save_screenshot(str(target))
            _smaller(target)
            sys.stdout.write(f"{target}: {target.stat().st_size / 1e3:.0f} kB\n")


def _smaller(file: Path) -> None:
    """With few colours: a third of the size."""
    from PIL import Image

    with Image.open(file) as image:
        image.convert("RGB").quantize(96, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--picture", type=Path, metavar="RUN")
    parser.add_argument("--pictures", action="store_true")
    arguments = parser.parse_args()
    if arguments.picture is not None:
        picture(arguments.picture)
    elif arguments.pictures:
        pictures()
    elif arguments.open:
        opening()
    else:
        torch.set_num_threads(1)
        sys.stdout.write(
            "| samples | tokens each | the step waits, CPU ms | all threads, CPU ms | kB |\n|---|---|---|---|---|\n"
        )
        for groups, size, response in ((32, 8, 27), (32, 8, 250), (32, 8, 1000)):
            wait, cpu, kept = recording(groups, size, response)
            row = f"| {groups * size} | {response} | {1e3 * wait:.0f} | {1e3 * cpu:.0f} | {kept / 1e3:.0f} |"
            sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    main()
