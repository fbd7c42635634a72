"""Record of a step's samples: blocks of :mod:`roll.tracking.run_record`, made of batches and rows."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from roll.config.run import SampleLogConfig
from roll.datasets.preferences import JudgedRow
from roll.datasets.types import SftRow
from roll.protocol import DataProto
from roll.protocol.vision import IMAGES, VisionInputs
from roll.rollout.groups import SampleGroup
from roll.strategies.base import Output
from roll.tracking import SampleTable
from roll.tracking.callbacks import sample_rows
from roll.tracking.run_record import SampleLog

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from roll.rollout.episodes import EpisodeGroup


# A sample of a block, but for its prompt and its tokens, by the keys of :mod:`roll.tracking.run_record`; values that
# are None or empty are left out of the file.
Sample = dict[str, Any]
# Values of a batch's samples (by row) or episodes (by number) that the batch does not hold: keys of the prompt, and of
# the sample.
Notes = Sequence[tuple[dict[str, Any], Sample]]

LOG_PROB_SCALE, MISMATCH_SCALE = 1e3, 1e5
THUMBNAIL = 128  # longest side of an image's copy in the record, in pixels
MAX_IMAGES = 1000  # images that a process writes; later ones are named only
MAX_TOKENS = 4096  # of a sample that are kept, from its first prompt's end on
_MAX_TEXT = 20_000  # characters of a prompt, or of a response without tokens


def sample_notes(groups: Sequence[SampleGroup]) -> Notes:
    """One entry a row of :func:`roll.rollout.groups.build_batch`."""
    found: list[tuple[dict[str, Any], Sample]] = []
    for group in groups:
        item = group.item
        prompt: dict[str, Any] = {"text": item.prompt_text[:_MAX_TEXT], "truth": _short(item.ground_truth)}
        if item.vision is not None:
            prompt["images"] = list(item.vision.file_names)
        found += [(prompt, {"metrics": dict(one.reward.metrics), "error": one.reward.error}) for one in group.members]
    return found


def episode_notes(groups: Sequence[EpisodeGroup]) -> Notes:
    """One entry an episode, in the order of ``episode_ids``."""
    found = []
    for episode in (episode for group in groups for episode in group.members):
        # Names of the images that the first call was shown, and of those that any was, each once.
        first, images = (
            list(dict.fromkeys(image.file_name for call in calls for image in call.images)) or None
            for calls in (episode.calls[:1], episode.calls)
        )
        metrics = {name: float(value) for name, value in episode.metrics.items()}
        sample = {"metrics": metrics, "error": episode.error, "outcome": episode.outcome, "images": images}
        found.append(({"seed": episode.task.seed, "images": first}, sample))
    return found


class SampleRecorder:
    """Writes blocks into ``log`` (None: nothing is recorded), a bounded number of samples a step; ``seen`` is called
    with step and rows."""

    def __init__(
        self,
        log: SampleLog | None,
        settings: SampleLogConfig,
        seen: Callable[[int, list[dict[str, Any]]], None] | None = None,
    ) -> None:
        self._log, self._settings, self._seen = log, settings, seen
        self._pieces: dict[int, str] = {}
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._shown: set[str] = set()  # names of the images that the record has

    def flush(self) -> None:
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _append(self, block: dict[str, Any]) -> None:
        assert self._log is not None
        self._log.append(block)
        if self._seen is not None:
            self._seen(block["step"], sample_rows(block, self._text))

    def policy(
        self,
        step: int,
        batch: DataProto,
        notes: Callable[[], Notes],
        tokenizer: PreTrainedTokenizerBase,
        trainer_log_probs: Tensor | None,
    ) -> None:
        """The samples of a training step, when they have advantages; ``trainer_log_probs`` float32 (B, L), before the
        update, None: no pass has computed them."""
        if self._log is None:
            return
        self._tokenizer = tokenizer
        block = _Block(step, "train", self._piece)
        rows, limit = np.arange(len(batch)), self._settings.max_samples_per_step
        if len(batch) > limit:
            # Whole groups, up to the limit; of a first group above it, its first rows.
            group_ids = batch.batch["group_ids"].numpy()
            # The second argsort gives each row its rank among the rows sorted by group.
            rank = np.argsort(np.argsort(group_ids, kind="stable"), kind="stable")
            last = {int(group): int(rank[group_ids == group].max()) for group in np.unique(group_ids)}
            rows = np.flatnonzero([last[int(group)] < limit for group in group_ids])
            rows = rows if len(rows) else np.flatnonzero(group_ids == group_ids.min())[:limit]
        columns = {name: batch.batch[name][rows].numpy() for name in _COLUMNS if name in batch.batch}
        if Output.ROUTES in batch.batch:
            last_layer = batch.batch[Output.ROUTES][:, :, -1]  # of all layers it would be a large copy
            columns[Output.ROUTES] = last_layer[rows].numpy()
        if trainer_log_probs is not None:
            columns["trainer_log_probs"] = trainer_log_probs[rows].numpy()
        of_rows = _Rows(columns)
        objects = {name: batch.non_tensor_batch.get(name) for name in _OBJECTS}
        about = notes()
        for place, row in enumerate(rows.tolist()):
            number = row if of_rows.episodes is None else of_rows.episodes[place]
            known, sample = about[number] if number < len(about) else ({}, {})
            words = {name: None if column is None else column[row] for name, column in objects.items()}
            # The ids before the first sampled token, and after it.
            ids, begin = columns["input_ids"][place, : of_rows.lengths[place]].tolist(), of_rows.begins[place]
            prompt, prompt_ids = dict(known), ids[:begin]
            prompt |= {"id": words["prompt_id"], "domain": words["domain"], "tag": words["tag"]}
            if "text" not in prompt:
                prompt["text"] = self._text(prompt_ids)
            elif "images" not in prompt:
                prompt["decoded"] = block.read_back(str(words["prompt_id"]), prompt["text"], prompt_ids, self._text)
            numbers = {name: _number(value) for name, value in sample.get("metrics", {}).items()}
            # A copy: rows of one episode share its note.
            sample = {**sample, "metrics": numbers, "finish_reason": words["finish_reason"], "role": words["role"]}
            of_rows.fill(place, sample)
            block.add(prompt, sample, ids[begin:])
        self._append(block.finished())
        if IMAGES in batch.non_tensor_batch:
            self._show(step, batch.non_tensor_batch[IMAGES][rows])

    def _show(self, step: int, seen: Iterable[VisionInputs | None]) -> None:
        """Write small copies of images that the record does not have yet, up to :data:`MAX_IMAGES` of them."""
        fresh: dict[str, str] = {}
        for image in (image for vision in seen if vision is not None for image in vision.pictures):
            if image.file_name not in self._shown and len(self._shown) < MAX_IMAGES:
                self._shown.add(image.file_name)
                fresh[image.file_name] = base64.b64encode(image.thumbnail(THUMBNAIL)).decode("ascii")
        if fresh and self._log is not None:
            empty: dict[str, list[Any]] = {name: [] for name in ("prompts", "samples", "ids", "pieces")}
            self._log.append({"step": step, "kind": "images", "time": time.time(), **empty, "images": fresh})

    def texts(self, kind: str, step: int, table: SampleTable, part: str = "") -> None:
        """Samples as text, without their tokens: those of a validation, or of its set ``part``."""
        if self._log is None or not table:
            return
        block = _Block(step, kind, self._piece)
        for number, row in enumerate(table[: self._settings.max_samples_per_step]):
            prompt = {
                "id": str(row.get("prompt_id", "")),
                "text": str(row.get("prompt", ""))[:_MAX_TEXT],
                "domain": str(row.get("domain") or part),
                "tag": str(row.get("tag", "")),
                "truth": _short(row.get("ground_truth")),
                "images": row.get("images"),
            }
            sample: Sample = {"group": str(row.get("prompt_id", number)), "score": _number(row.get("score"))}
            names = ("metrics", "error", "finish_reason", "outcome", "response_tokens")
            sample |= {name: row.get(name) for name in names}
            block.add(prompt, sample | {"response": str(row.get("response", ""))[:_MAX_TEXT]})
        self._append(block.finished())

    def demonstrations(self, step: int, rows: Sequence[SftRow], tokenizer: PreTrainedTokenizerBase) -> None:
        """Prompts and responses that the model is trained to imitate."""
        if self._log is None:
            return
        self._tokenizer = tokenizer
        block = _Block(step, "train", self._piece)
        rows = rows[: self._settings.max_samples_per_step]
        for row in rows:
            ids, response = row.input_ids[: row.prompt_length], row.input_ids[row.prompt_length :]
            names = None if row.vision is None else list(row.vision.file_names)
            prompt = {"id": row.row_id, "text": self._text(ids), "tag": row.tag, "images": names}
            block.add(prompt, {"group": row.row_id, "response_tokens": len(response)}, response)
        self._append(block.finished())
        self._show(step, [row.vision for row in rows])

    def pairs(self, step: int, rows: Sequence[JudgedRow], batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> None:
        """The responses of a step, in the rows of ``batch``, a group for each prompt: chosen and rejected, or with
        their scores."""
        if self._log is None:
            return
        self._tokenizer = tokenizer
        block = _Block(step, "train", self._piece)
        reference, mask = batch.batch.get("ref_log_probs"), batch.batch["response_mask"]
        place = -1
        for row in rows[: max(1, self._settings.max_samples_per_step // 2)]:
            prompt = {"id": row.row_id, "text": self._text(row.prompt_ids), "tag": row.tag}
            scores = [f"score {score:g}" for score in row.scores[: len(row.responses)]]
            kinds = scores or ["chosen", "rejected"]
            for kind, ids in zip(kinds, row.responses, strict=True):
                place += 1
                sample: Sample = {"group": row.row_id, "kind": kind, "response_tokens": len(ids)}
                if row.margin is not None:
                    sample["metrics"] = {"margin": row.margin}
                if reference is not None:
                    log_probs = reference[place][mask[place]].numpy()
                    sample["ref_log_probs"] = _scaled(log_probs[:MAX_TOKENS], LOG_PROB_SCALE)
                block.add(prompt, sample, ids)
        self._append(block.finished())

    def _text(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))[:_MAX_TEXT]

    def _piece(self, token: int) -> str:
        """The text of one token; of a part of a character the replacement character."""
        if token not in self._pieces:
            assert self._tokenizer is not None
            text = str(self._tokenizer.decode([token], skip_special_tokens=False))
            raw = self._tokenizer.convert_ids_to_tokens(token)
            # SentencePiece drops the space that begins a word where the word begins the text.
            if isinstance(raw, str) and raw.startswith("\u2581") and not text.startswith(" "):
                text = f" {text}"
            self._pieces[token] = text
        return self._pieces[token]


_COLUMNS = (
    *("input_ids", "attention_mask", "response_mask", "rollout_log_probs", "advantages", "weight_versions"),
    *("scores", "response_level_rewards", "turn_ids", "turn_rewards", "episode_ids", "group_ids"),
)
_OBJECTS = ("prompt_id", "domain", "tag", "finish_reason", "outcome", "role")


class _Block:
    def __init__(self, step: int, kind: str, piece: Callable[[int], str]) -> None:
        self._head = {"step": step, "kind": kind, "time": time.time()}
        self._piece = piece
        self._prompts: list[dict[str, Any]] = []
        self._places: dict[tuple[str, str, str], int] = {}
        self._samples: list[dict[str, Any]] = []
        self._ids: list[NDArray[np.int64]] = []
        self._read_back: dict[tuple[str, str], str | None] = {}  # decoded ids of prompts that differ from their text

    def add(self, prompt: Mapping[str, Any], sample: Sample, ids: Sequence[int] | None = None) -> None:
        """A sample with its tokens after the prompt; what is None is left out."""
        key = (str(prompt.get("id", "")), str(prompt.get("text", "")), str(prompt.get("tag", "")))
        if key not in self._places:
            self._places[key] = len(self._prompts)
            self._prompts.append({name: value for name, value in prompt.items() if value not in (None, "")})
        kept = {name: value for name, value in sample.items() if value is not None and value != {}}
        if ids is not None:
            self._ids.append(np.asarray(ids[:MAX_TOKENS], dtype=np.int64))
            kept["tokens"] = len(self._ids) - 1
            if len(ids) > MAX_TOKENS:
                kept["cut"] = len(ids) - MAX_TOKENS
        self._samples.append({"prompt": self._places[key], **kept})

    def read_back(
        self, prompt_id: str, text: str, ids: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> str | None:
        """The decoded ids of a prompt, where they are another text than ``text``; decoded once for each prompt."""
        key = prompt_id, text
        if key not in self._read_back:
            decoded = decode(ids)
            # But for white space, which some tokenizers add or drop at the ends, and a token that begins the text.
            own, read = "".join(text.split()), "".join(decoded.split())
            alike = own == read or (read.endswith(own) and len(read) - len(own) < 24)
            self._read_back[key] = None if alike else decoded
        return self._read_back[key]

    def finished(self) -> dict[str, Any]:
        """The block, with the vocabulary that it uses."""
        everything = np.concatenate(self._ids) if self._ids else np.zeros(0, dtype=np.int64)
        # Samples refer to the block's own vocabulary, so that each text of a token is in the file once.
        vocabulary, inverse = np.unique(everything, return_inverse=True)
        parts = np.split(inverse, np.cumsum([len(ids) for ids in self._ids])[:-1]) if self._ids else []
        for sample in self._samples:
            if "tokens" in sample:
                sample["tokens"] = parts[sample["tokens"]].tolist()
        ids = vocabulary.tolist()
        pieces = [self._piece(token) for token in ids]
        return {**self._head, "prompts": self._prompts, "ids": ids, "pieces": pieces, "samples": self._samples}


class _Rows:
    """The rows of a batch as fields of samples. What can be is computed for all rows at once: a step is not to wait."""

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = columns
        self._mask = mask = columns["response_mask"]
        lengths = columns["attention_mask"].sum(-1)
        begins = np.where(mask.any(-1), mask.argmax(-1), lengths)
        self.begins, self.lengths = begins.tolist(), lengths.tolist()
        self._ends = np.minimum(lengths, begins + MAX_TOKENS).tolist()
        self._counts = mask.sum(-1).tolist()
        self.episodes: list[int] | None = columns["episode_ids"].tolist() if "episode_ids" in columns else None
        self._log_probs = _scaled(columns["rollout_log_probs"], LOG_PROB_SCALE)
        self._mismatch: list[list[int]] | None = None
        if "trainer_log_probs" in columns:
            difference = np.where(mask, columns["trainer_log_probs"] - columns["rollout_log_probs"], 0.0)
            self._mismatch = _scaled(difference, MISMATCH_SCALE)
        versions = columns["weight_versions"]
        high = np.where(mask, versions, -1).max(-1, initial=-1)
        self._version = np.where(high == np.where(mask, versions, high[:, None]).min(-1), high, -1).tolist()
        self._advantage: list[float] | None = None
        if "advantages" in columns:
            advantages = columns["advantages"].astype(np.float64)
            low = np.where(mask, advantages, np.inf).min(-1, initial=np.inf)
            top = np.where(mask, advantages, -np.inf).max(-1, initial=-np.inf)
            self._advantage = np.where(top - low < 1e-7, low, np.where(top < low, 0.0, np.nan)).tolist()

    def fill(self, row: int, sample: Sample) -> None:
        """Set the fields of ``sample`` that the batch holds."""
        columns, begin, end = self._columns, self.begins[row], self._ends[row]
        sample["group"] = str(int(columns["group_ids"][row]))
        sample["score"], sample["response_tokens"] = _number(columns["scores"][row]), self._counts[row]
        if "response_level_rewards" in columns:
            sample["reward"] = _number(columns["response_level_rewards"][row])
        if end <= begin:
            return
        here = slice(begin, end)
        sample["log_probs"] = self._log_probs[row][here]
        if self._counts[row] < self.lengths[row] - begin:
            given = ~self._mask[row, here]
            sample["given"] = [[first, last] for first, last in _stretches(given) if given[first]] or None
        if self._mismatch is not None:
            sample["mismatch"] = self._mismatch[row][here]
        if self._advantage is not None:
            same = self._advantage[row]
            # Not NaN, which marks advantages that differ from token to token.
            if same == same:
                sample["advantages"] = float(f"{same:.5g}")
            else:
                sample["advantages"] = [float(f"{value:.4g}") for value in columns["advantages"][row, here].tolist()]
        version = self._version[row]
        versions = columns["weight_versions"][row, here][self._mask[row, here]]
        pairs = [[int(versions[first]), last - first] for first, last in _stretches(versions)]
        # One version for all, or pairs of version and number of tokens.
        sample["versions"] = version if version >= 0 else pairs if len(pairs) > 1 else pairs[0][0] if pairs else 0
        if Output.ROUTES in columns:
            chosen = columns[Output.ROUTES][row, here]
            # uint8 has no -1. Engines do not report all tokens, such as the last one.
            known = (chosen != (255 if chosen.dtype == np.uint8 else -1)).all(-1).tolist()
            experts = [ids if is_known else None for ids, is_known in zip(chosen.tolist(), known, strict=True)]
            sample["experts"] = experts if any(known) else None
        if "turn_ids" in columns:
            turns, rewards = columns["turn_ids"][row, here], columns["turn_rewards"][row, here]
            sample["turns"] = [
                [first, last, round(float(rewards[first:last].sum()), 6)]
                for first, last in _stretches(turns)
                if turns[first] >= 0
            ]


def _scaled(values: NDArray[Any], scale: float) -> Any:
    finite = np.nan_to_num(np.asarray(values, dtype=np.float64) * scale, nan=0.0, posinf=1e9, neginf=-1e9)
    return finite.round().astype(np.int64).tolist()


def _stretches(values: NDArray[Any]) -> list[tuple[int, int]]:
    """``(first, end)`` of the stretches of equal values."""
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    return list(pairwise([0, *edges.tolist(), len(values)])) if len(values) else []


def _number(value: SupportsFloat | None) -> float | None:
    """Six significant digits; None for what is not finite, which JSON has no form for."""
    number = math.nan if value is None else float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None


def _short(value: object) -> Any:
    return value if value is None or isinstance(value, int | float | bool) else str(value)[:2000]
