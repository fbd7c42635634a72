"""Continuous batching: which samples run, and what happens to them at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from llguidance import LLMatcher

from roll.strategies.engines.base import MID_UPDATE
from roll.strategies.engines.requests import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    StopStringMatcher,
    check_request,
)
from roll.strategies.engines.sampling import JsonGrammars, stream_key
from roll.strategies.hf_infer.cache import CachedSequence, PrefixCache
from roll.strategies.hf_infer.decoder import Decoder, FusedDecoder, Images, PromptStates, round_up
from roll.strategies.hf_infer.drafts import Drafter
from roll.strategies.hf_infer.queue import MAX_PREFILL_TOKENS, Queue, QueuedGroup
from roll.strategies.hf_infer.rows import DecodeSlots, Places, RunningRows, RunningSample, Sampler, SlotCache


class GenerationEngine:
    """Runs requests on a decoder, up to ``max_num_seqs`` samples at a time.

    Args:
        decode_text: token ids to text (needed by requests with stop strings).
        eos_token_ids: end every sample, in addition to the request's own stop tokens.
        max_model_len: most tokens of prompt and response together.
        seed: of the requests that bring none.
        prefix_cache_tokens: capacity of the prefix cache.
        grammars: for requests whose responses follow a JSON schema; None: they are refused.
        drafter: proposes tokens that a pass of a :class:`~roll.strategies.hf_infer.decoder.FusedDecoder` verifies.
    """

    def __init__(
        self,
        decoder: Decoder,
        decode_text: Callable[[list[int]], str],
        eos_token_ids: Sequence[int],
        max_num_seqs: int,
        max_model_len: int,
        seed: int = 42,
        prefix_cache_tokens: int = 0,
        grammars: JsonGrammars | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._decoder, self._decode_text, self._grammars = decoder, decode_text, grammars
        self._drafter = drafter
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_model_len, self._seed = max_model_len, seed
        self._requests_without_seed = 0
        self._failures: dict[str, str] = {}
        self._version = 0
        self._new_version: int | None = None
        self._queue = Queue()
        self._unfinished: dict[str, int] = {}
        self._rows = RunningRows(max_num_seqs, max_model_len)
        self._cache = self._new_cache()
        # The state of a linear-attention layer sums up all tokens so far; that of a prefix cannot be recovered from it.
        self._prefixes = PrefixCache(0 if decoder.cache_shape.states else prefix_cache_tokens)
        self.num_prompt_tokens = 0  # of all prompts so far, each counted when its first samples start
        self._sampler = self._new_sampler()

    def _new_sampler(self) -> Sampler:
        made = self._decoder
        return Sampler(self._rows, made.vocab_size, made.device, made.masked_token_ids, made.is_invariant)

    @property
    def counts(self) -> Mapping[str, int]:
        """See the base class."""
        drafts = {} if self._drafter is None else self._drafter.counts
        return {"prompt_tokens": self.num_prompt_tokens, "reused_tokens": self._prefixes.num_reused, **drafts}

    @property
    def num_unfinished(self) -> int:
        return sum(self._unfinished.values())

    def add_requests(self, requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        taken = set(self._unfinished)
        for request in requests:
            check_request(request, taken, self._max_model_len, self._decoder.vocab_size)
            if request.params.json_schema is not None:
                self._grammar(request.params.json_schema)
            self._decoder.check_images(f"request {request.request_id!r}", request.prompt_token_ids, request.vision)
            taken.add(request.request_id)
        for request in requests:
            wanted, seed = request.unfinished_samples, request.params.seed
            if seed is None:
                self._requests_without_seed += 1
                seed = stream_key(self._seed, self._requests_without_seed)
            self._unfinished[request.request_id] = len(wanted)
            self._queue.add(request, seed, request.params.ends(self._eos_token_ids))

    @torch.inference_mode()
    def step(self) -> list[GenerationOutput]:
        """Admit what fits, sample one token for every running sample, more where drafts of its next ones are accepted,
        and return those that ended; RuntimeError during an update, in which tokens would be sampled with a mixture of
        weights."""
        if self._new_version is not None:
            raise RuntimeError(f"hf_infer: {MID_UPDATE}")
        rows = self._rows
        num_running, rows.recorded[:] = rows.size, 0
        first_logits = self._admit()
        if not rows.size:
            return []
        drafts = self._drafts(num_running)
        places = Places(rows.generated[: rows.size], drafts)
        logits = []
        if num_running:
            logits.append(self._verify(drafts) if any(drafts) else self._decode(num_running))
        logits += [first_logits] if first_logits is not None else []
        tokens, log_probs = self._sampler.sample(logits[0] if len(logits) == 1 else torch.cat(logits), places)
        return self._record(tokens, log_probs, places, drafts)

    def _drafts(self, size: int) -> list[list[int]]:
        """Drafts of the next tokens of the first ``size`` rows, some of them empty; an empty list without a drafter."""
        if self._drafter is None or not size:
            return []
        rows = self._rows
        # A sample's last token is never an input.
        limits = rows.max_new[:size] - rows.generated[:size] - 1
        return self._drafter.propose([sample.draftable for sample in rows.samples[:size]], limits)

    def _record(
        self, tokens: np.ndarray, log_probs: np.ndarray, places: Places, drafts: Sequence[Sequence[int]]
    ) -> list[GenerationOutput]:
        """Add to each row the token of its first place, and of a further one while what was sampled before is what was
        drafted; return the samples that ended."""
        size, starts = self._rows.size, places.starts
        is_drafted = np.zeros(len(tokens), bool)  # what is sampled at a place is what was drafted for it
        for draft, start in zip(drafts, starts, strict=False):
            is_drafted[start : start + len(draft)] = tokens[start : start + len(draft)] == draft
        failed: list[int] = []
        reasons: dict[int, FinishReason] = {}
        rows, at = np.arange(size), starts[:size]
        while len(rows):
            stopped = self._rows.record(rows, tokens[at], log_probs[at])
            is_finite = np.isfinite(log_probs[at])
            ended = stopped | (self._rows.generated[rows] >= self._rows.max_new[rows])
            failed += rows[~is_finite].tolist()
            for row, has_stopped in zip(rows[ended & is_finite], stopped[ended & is_finite], strict=True):
                reasons[int(row)] = "stop" if has_stopped else "length"
            goes_on = is_drafted[at] & ~ended & is_finite
            rows, at = rows[goes_on], at[goes_on] + 1
        if self._drafter is not None:
            recorded = self._rows.recorded[:size]
            self._drafter.counts["accepted_tokens"] += int((recorded - 1).sum())
            for sample, start, count in zip(self._rows.samples, starts, recorded, strict=False):
                if sample.draftable is not None:
                    self._drafter.extend(sample.draftable, tokens[start : start + count].tolist())
        if failed:
            self._prefixes.clear()  # it may hold their prompts, whose keys and values may not be finite either
            # Attention multiplies what lies past a row's end by 0, which has to give 0 for the next sample there.
            self._cache.data[:, :, failed] = 0
        failed_requests = set()
        for row in failed:
            sample = self._rows.samples[row]
            sample.stale = True
            why = f"sample {sample.sample_index}: the log-probs of token {self._rows.generated[row]} are not finite"
            self._failures[sample.request.request_id] = why
            failed_requests.add(sample.request.request_id)
        finished = sorted(reasons)
        outputs = self._release(np.array(finished, np.int64), [reasons[row] for row in finished])
        if failed_requests:
            self.abort(failed_requests)
        return outputs

    def take_failures(self) -> dict[str, str]:
        """Requests without a finite distribution of their next token, by id, since the last call."""
        failures, self._failures = self._failures, {}
        return failures

    def recover(self) -> list[GenerationOutput]:
        """Drop everything after an error in :meth:`step`; return the samples as they were before it."""
        # A step that failed after recording never reported its tokens, and one may have ended its sample: undo.
        self._rows.generated -= self._rows.recorded
        outputs = [self._rows.output(row, "abort") for row in range(self._rows.size)]
        for output in outputs:
            del output.top_log_probs[len(output.token_ids) :]
        outputs += [output for group in self._queue for output in group.aborted()]
        self._queue.clear()
        self._unfinished.clear()
        self._prefixes.clear()
        self._cache.data.zero_()  # some of it may not be finite
        self._rows = RunningRows(self._rows.capacity, self._max_model_len)
        self._sampler = self._new_sampler()
        return outputs

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """End requests (None: all) now; unknown or finished ones are passed over."""
        unwanted = set(self._unfinished if request_ids is None else request_ids)
        rows = [row for row, sample in enumerate(self._rows.samples) if sample.request.request_id in unwanted]
        outputs = self._release(np.array(rows, dtype=np.int64), ["abort"] * len(rows))
        for group in self._queue.remove(unwanted):
            self._unfinished.pop(group.request.request_id, None)
            outputs += group.aborted()
        return outputs

    def running(self, request_ids: Iterable[str]) -> list[GenerationOutput]:
        """The unfinished samples of these requests as they are, also those that wait for a free row."""
        wanted = set(request_ids)
        rows = [row for row, sample in enumerate(self._rows.samples) if sample.request.request_id in wanted]
        waiting = [group.aborted() for group in self._queue if group.request.request_id in wanted]
        return [*(self._rows.output(row, "abort") for row in rows), *chain.from_iterable(waiting)]

    def set_version(self, version: int) -> None:
        """Sample with weights ``version`` from now on; prompts that are admitted in part are recomputed."""
        self._version = version
        if self._prefixes.num_tokens:
            self._prefixes.clear()
        self._decoder.features.clear()
        for group in self._queue:
            group.prompt = None
        for row, sample in enumerate(self._rows.samples):
            sample.note_version(version, int(self._rows.generated[row]))
            sample.stale = True  # its cache is of older weights: not to be kept as a prefix

    @torch.inference_mode()
    def recompute_running(self) -> None:
        """Compute the keys and values of all running samples again, with the current weights."""
        rows, begin = self._rows, 0
        while begin < rows.size:
            end = begin + 1
            # The last token of a sample is not in the cache yet: the next step puts it there.
            while end < rows.size and rows.lengths[begin : end + 1].max() * (end + 1 - begin) <= MAX_PREFILL_TOKENS:
                end += 1
            requests = [sample.request for sample in rows.samples[begin:end]]
            states = self._prefill([rows.token_ids(row)[:-1] for row in range(begin, end)], requests)
            self._cache.write_prompts(begin, states.keys_values, [1] * (end - begin), states.states)
            begin = end
        for sample in rows.samples:
            sample.stale = False

    def _new_cache(self) -> SlotCache:
        decoder = self._decoder
        length = round_up(self._max_model_len, decoder.key_multiple)
        return SlotCache(decoder.cache_shape, self._rows.capacity, length, decoder.cache_dtype, decoder.device)

    def _admit(self) -> torch.Tensor | None:
        """Start queued samples in free rows, first come first served; the logits of their first tokens."""
        admitted = self._queue.chosen(self._rows.capacity - self._rows.size, self._find)
        if not admitted:
            return None
        new = [one for one in admitted if one[0].prompt is None]
        cached = [(group, count, group.found) for group, count in new if group.found is not None]
        missing = [(group, count) for group, count in new if group.found is None]
        logits = [self._start_samples([one], one[0].prompt) for one in admitted if one[0].prompt is not None]
        if cached:
            prompts, found = [group.token_ids for group, _, _ in cached], [found for _, _, found in cached]
            longest = max(map(len, prompts))
            # One sample of each prompt: extended in its row of the cache, without another copy. Otherwise in a buffer,
            # since the prompt is written to several rows, or kept for samples that wait for a row.
            if all(count == len(group.waiting) == 1 for group, count, _ in cached):
                first = self._rows.size
                room = self._cache.data[:, :, first : first + len(cached), :, :longest]
            else:
                shape = self._cache.shape
                size = (shape.num_layers, 2, len(cached), shape.num_kv_heads, longest, shape.head_dim)
                room = self._cache.data.new_zeros(size)
            for row, (sequence, known) in enumerate(found):
                room[:, :, row, :, :known] = sequence.keys_values[:, :, :, :known]
            self._prefixes.num_reused += sum(known for _, known in found)
            self.num_prompt_tokens += sum(map(len, prompts))
            images = _images([group.request for group, _, _ in cached])
            states = self._decoder.extend(room, [known for _, known in found], prompts, images)
            logits.append(self._start_samples([(group, count) for group, count, _ in cached], states))
        if missing:
            prompts = [group.token_ids for group, _ in missing]
            logits.append(self._start_samples(missing, self._prefill(prompts, [group.request for group, _ in missing])))
        self._queue.drop_started()
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _find(self, group: QueuedGroup) -> tuple[CachedSequence, int] | None:
        """The longest cached beginning of a group's tokens, and its length."""
        if not self._prefixes.num_tokens:
            return None
        return self._prefixes.find(self._decoder.prefix_key(group.token_ids, group.request.vision))

    def _prefill(self, prompts: Sequence[Sequence[int]], requests: Sequence[GenerationRequest]) -> PromptStates:
        self.num_prompt_tokens += sum(map(len, prompts))
        return self._decoder.prefill(prompts, _images(requests))

    def _start_samples(self, groups: list[tuple[QueuedGroup, int]], prompts: PromptStates) -> torch.Tensor:
        """Give samples of each group (prompt i of ``prompts``), as many as said, the next rows; their logits."""
        first_row, counts = self._rows.size, [count for _, count in groups]
        for number, (group, count) in enumerate(groups):
            for _ in range(count):
                self._start_sample(group, prompts.offsets[number] if prompts.offsets else 0)
                if prompts.routes is not None:
                    self._rows.put_routes(self._rows.size - 1, prompts.routes[number], group.carried)
        if group.waiting and group.prompt is None:
            group.prompt = prompts.only(number)
        # A cached prompt that was extended in its own row is there already.
        if prompts.keys_values.untyped_storage().data_ptr() != self._cache.data.untyped_storage().data_ptr():
            self._cache.write_prompts(first_row, prompts.keys_values, counts, prompts.states)
        source = torch.repeat_interleave(torch.tensor(counts)).to(self._decoder.device)
        return prompts.logits.index_select(0, source)

    def _start_sample(self, group: QueuedGroup, offset: int) -> None:
        request, index = group.request, group.waiting.popleft()
        params, carried, matcher = request.params, group.carried, None
        begun = carried.token_ids if carried is not None else ()
        if params.stop_strings:
            matcher = StopStringMatcher(self._decode_text, params.stop_strings, request.prompt_token_ids, begun)
        grammar = None if params.json_schema is None else self._grammar(params.json_schema, begun)
        sample = RunningSample(request, index, matcher, grammar)
        self._rows.append(sample, stream_key(group.seed, index), group.stop_ids, carried, offset)
        sample.note_version(self._version, int(self._rows.generated[self._rows.size - 1]))
        has_penalty = params.repetition_penalty != 1
        if has_penalty:
            self._sampler.admit(self._rows.size - 1, group.token_ids)
        # These settings make a token's distribution, or its record, depend on the tokens sampled before it.
        if self._drafter is not None and not has_penalty and grammar is None and not params.top_log_probs:
            sample.draftable = self._drafter.begin(request.prompt_token_ids, begun)

    def _grammar(self, schema: str, begun: Sequence[int] = ()) -> LLMatcher:
        if self._grammars is None:
            raise ValueError("response_format: this engine was started without a tokenizer")
        return self._grammars.start(schema, begun)

    def _decode(self, size: int) -> torch.Tensor:
        """Logits (size, vocab_size) of the next token of the first ``size`` rows."""
        # oneDNN builds a kernel for each batch size it meets (about a millisecond a matrix shape), so batches are
        # filled up to a few sizes. The rows that do not count write to the last place of the cache, which no sample
        # reads: the last token of the longest possible sample is never fed back.
        padded = min(round_up(size, 8 if size <= 64 else 32), self._rows.capacity)
        positions = np.full(padded, self._max_model_len - 1)
        positions[:size] = self._rows.lengths[:size] - 1
        device, offsets, ahead = self._decoder.device, self._rows.offsets[:size], None
        tokens = torch.from_numpy(self._rows.last_tokens[:padded]).to(device)
        if offsets.any():
            ahead = torch.from_numpy(np.pad(offsets, (0, padded - size))).to(device)
        places, multiple = torch.from_numpy(positions).to(device), self._decoder.key_multiple
        slots = DecodeSlots(self._cache, places, self._rows.lengths[:size], ahead, multiple)
        logits = self._decoder.decode(tokens, slots)[:size]
        if self._decoder.chosen is not None:
            assert self._rows.routes is not None
            self._rows.routes[np.arange(size), self._rows.lengths[:size] - 1] = self._decoder.chosen[:size]
        return logits

    def _verify(self, drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits (places, vocab_size) after the last token of each of the first rows and every token of its draft. What
        is written of tokens that are not accepted lies past the row's end, where later ones go."""
        assert isinstance(self._decoder, FusedDecoder)
        size = len(drafts)
        known = (self._rows.lengths[:size] - 1).tolist()
        tokens = [[int(last), *draft] for last, draft in zip(self._rows.last_tokens[:size], drafts, strict=True)]
        end = max(begin + len(new) for begin, new in zip(known, tokens, strict=True))
        held = self._cache.data[:, :, :size, :, : round_up(end, self._decoder.key_multiple)]
        return self._decoder.verify(held, known, tokens)

    def _release(self, rows: np.ndarray, reasons: Sequence[FinishReason]) -> list[GenerationOutput]:
        """Return the samples of ``rows`` (sorted) and close the gaps they leave."""
        outputs = [self._rows.output(int(row), reason) for row, reason in zip(rows, reasons, strict=True)]
        if not len(rows):
            return outputs
        # Ended samples go to the prefix cache; their last token has no keys and values.
        for row in rows:
            length = int(self._rows.lengths[row]) - 1
            sample = self._rows.samples[row]
            if length in self._prefixes.lengths and not sample.stale:
                key = self._decoder.prefix_key(self._rows.token_ids(row)[:length], sample.request.vision)
                self._prefixes.put(key, self._cache.data[:, :, row, :, :length])
        for output in outputs:
            self._unfinished[output.request_id] -= 1
            if not self._unfinished[output.request_id]:
                del self._unfinished[output.request_id]
        destination, source = self._rows.remove(rows)
        if len(destination):
            self._cache.move(destination, source, int(self._rows.lengths[destination].max()))
            self._sampler.move(destination, source)
        return outputs


def _images(requests: Sequence[GenerationRequest]) -> Images | None:
    """Images of each request's prompt; None where all are text."""
    images = [request.vision for request in requests]
    return None if all(vision is None for vision in images) else images
