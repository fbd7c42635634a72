"""The ``sglang`` strategy: SGLang's tokenizer manager on this worker's event loop, its schedulers in processes."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import tempfile
import zlib
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.managers import io_struct
from sglang.srt.utils import MultiprocessingSerializer

from roll.config.roles import WorkerConfig
from roll.config.strategies.engines import SGLANG, SglangStrategyConfig
from roll.platforms import current_platform
from roll.strategies.engines.base import PackagedEngine, check_version
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, StopStringMatcher, check_request
from roll.strategies.engines.sampling import stream_key
from roll.strategies.sglang.arguments import Sample, bound_threads, engine_arguments, sampling_settings
from roll.strategies.sglang.scheduler import LOADER, REPORTER, TokenEngine, agreed_checksums
from roll.weight_sync.encoding import WeightBucket

logger = logging.getLogger(__name__)

_STEP_SECONDS = 1.0  # limit of a step's wait for a token
_TURNS = 5  # of the event loop, after which the chunks received so far have passed SGLang's queues to the samples


class SglangStrategy(PackagedEngine):
    """Generation by SGLang, on CPU or GPU. All waiting is done in this class's methods, on one event loop."""

    _config: SglangStrategyConfig

    def __init__(self, role: WorkerConfig, seed: int = 42) -> None:
        super().__init__(role, seed)
        self._engine: TokenEngine | None = None
        self._following: dict[Sample, asyncio.Task[None]] = {}
        """Unfinished samples, also those whose end no step has reported, in the order of their arrival."""
        self._progress = asyncio.Event()
        self._num_started = 0
        self._held: dict[str, int] = {}  # checksums of all tensors that updates have brought, as of the last one

    def initialize(self) -> None:
        """See the base class; ValueError for an SGLang outside the tested versions."""
        check_version(SGLANG, sglang.__version__, self._config.allow_untested_version)
        # It warns of every token that comes after its sample was stopped.
        logging.getLogger("sglang.srt.managers.tokenizer_manager").setLevel(logging.ERROR)
        platform = current_platform()
        model_config, tokenizer = self._read_model_folder(self._config.max_model_len)
        self._decode: Any = partial(tokenizer.decode, skip_special_tokens=False)
        self._vocab_size = model_config.get_text_config().vocab_size
        arguments = engine_arguments(self.role, self._config, model_config, self._max_model_len, self.seed, platform)
        with bound_threads(self._config.tp_size):
            self._engine = TokenEngine(**arguments)
        self._manager: Any = self._engine.tokenizer_manager
        self._loop = self._engine.loop
        self._keeps_cache = self._config.in_flight_update == "keep"
        self._run(self._listen())
        logger.info(
            "sglang %s: up to %d samples of %d tokens; %d rank(s)",
            sglang.__version__,
            self._config.max_num_seqs,
            self._max_model_len,
            self._config.tp_size,
        )

    async def _listen(self) -> None:
        """Start SGLang's own tasks, without its handler of SIGTERM: this worker's stays."""
        before = signal.getsignal(signal.SIGTERM)
        self._manager.auto_create_handle_loop()
        self._loop.remove_signal_handler(signal.SIGTERM)
        if before is not None:  # one that Python knows
            signal.signal(signal.SIGTERM, before)

    def _run(self, awaitable: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(awaitable)

    def add_requests(self, requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        taken = {sample.request.request_id for sample in self._following}
        for request in requests:
            check_request(request, taken, self._max_model_len, self._vocab_size)
            if request.params.json_schema is not None:
                raise ValueError("response_format: sglang samples without a grammar here; hf_infer and vllm have one")
            if request.vision is not None:
                raise ValueError(f"request {request.request_id!r}: has images; hf_infer and vllm take them")
            taken.add(request.request_id)
        for request in requests:
            # Every sample is a separate request to SGLang; tokens of a partial sample become part of its prompt.
            for index in request.unfinished_samples:
                begun = request.partial.get(index)
                params, prompt = request.params, list(request.prompt_token_ids)
                tokens = [] if begun is None else list(begun.token_ids)
                matcher = None
                if params.stop_strings:
                    matcher = StopStringMatcher(self._decode, params.stop_strings, prompt, tokens)
                # Without a seed in the request, its id gives one: different for each request, the same after an abort.
                seed = zlib.crc32(request.request_id.encode(), self.seed) if params.seed is None else params.seed
                most = min(params.max_new_tokens, self._max_model_len - len(prompt))
                settings = sampling_settings(
                    params, self._end_token_ids, most, len(prompt), len(tokens), stream_key(seed, index)
                )
                sample = Sample(request, index, begun, self._version, matcher)
                self._following[sample] = self._loop.create_task(self._follow(sample, prompt + tokens, settings))

    async def _follow(self, sample: Sample, token_ids: list[int], settings: dict[str, Any]) -> None:
        """Record a sample's tokens as they arrive, until it ends."""
        assert self._engine is not None
        self._num_started += 1
        stream = await self._engine.async_generate(
            input_ids=token_ids,
            sampling_params=settings,
            return_logprob=True,
            top_logprobs_num=min(sample.request.params.top_log_probs, self._vocab_size),
            stream=True,
            # SGLang aborts every request whose id has the given prefix: without the point, aborting 1 would abort 10.
            rid=f"{self._num_started}.",
            # The cache then survives updates; the salt keeps new requests from reusing prefixes of older weights.
            cache_salt=str(self._version) if self._keeps_cache else None,
        )
        try:
            async for chunk in stream:
                sample.take(chunk)
                self._progress.set()
                if sample.finish_reason is not None:
                    break
        finally:
            await stream.aclose()  # ends it in the scheduler, too, where it has not ended there
            if sample in self._following:  # it was not aborted: the next step has something to say of it
                self._progress.set()

    def step(self) -> list[GenerationOutput]:
        """Wait for new tokens; return the samples that ended. A request is left to :meth:`take_failures` where SGLang
        has given a sample of it up, or has drawn one from log-probs that are not finite."""
        self._check_no_update()
        self._run(self._wait_for_tokens())
        done = [sample for sample, task in self._following.items() if task.done()]
        failed: dict[str, str] = {}
        for sample in done:
            if isinstance(error := self._following.pop(sample).exception(), Exception):
                failed[sample.request.request_id] = f"{type(error).__name__}: {error}"
        outputs = [sample.output() for sample in done if sample.request.request_id not in failed]
        return self._without_failed(outputs, failed)

    async def _wait_for_tokens(self) -> None:
        if not self._progress.is_set():
            try:
                await asyncio.wait_for(self._progress.wait(), _STEP_SECONDS)
            except TimeoutError:
                return
        await self._settle()
        self._progress.clear()

    async def _settle(self) -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    @property
    def num_unfinished(self) -> int:
        return len(self._following)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """See the base class; unknown or finished requests are passed over."""
        wanted = None if request_ids is None else set(request_ids)
        samples = [s for s in self._following if wanted is None or s.request.request_id in wanted]
        self._end([self._following.pop(sample) for sample in samples])
        for sample in samples:
            if sample.finish_reason is not None:
                sample.step_back()
        return [sample.output() for sample in samples]

    def _end(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            self._run(asyncio.wait(tasks))

    def running(self, request_ids: Iterable[str]) -> list[GenerationOutput]:
        """See the base class; a sample that has ended is left to the next step."""
        wanted = set(request_ids)
        return [s.output() for s in self._following if s.request.request_id in wanted and s.finish_reason is None]

    def start_weight_update(self, version: int) -> None:
        """See the base class. Samples that are running wait until the end of the update."""
        super().start_weight_update(version)
        mode = "in_place" if self._keeps_cache else "retract"
        self._run(self._manager.pause_generation(io_struct.PauseGenerationReqInput(mode=mode)))
        self._request("begin_weight_update", io_struct.BeginWeightUpdateReqInput())
        # The reply came after the last tokens of the old weights.
        self._run(self._settle())

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See the base class; a tensor of another dtype is converted to the engine's. RuntimeError where SGLang refuses
        it."""
        self._updating("update_weights")
        if tensors:
            # One contiguous copy: these may be read-only shared memory, and each by itself costs a file descriptor.
            bucket = WeightBucket.pack(tensors.items(), next(iter(tensors.values())).device)
            self._send(LOADER, list(bucket.tensors().items()))

    def finish_weight_update(self) -> dict[str, int]:
        """See the base class; of all tensors that any update has brought. RuntimeError where SGLang refuses it, or its
        model could not load a tensor."""
        version = self._updating("finish_weight_update")
        with tempfile.TemporaryDirectory(prefix="roll-sglang-") as folder:
            message = [(folder, torch.zeros(1))]
            self._send(REPORTER, message, flush_cache=not self._keeps_cache, weight_version=str(version))
            reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).iterdir())]
        self._request("end_weight_update", io_struct.EndWeightUpdateReqInput())
        self._run(self._manager.continue_generation(io_struct.ContinueGenerationReqInput()))
        self._held = agreed_checksums(reports, self._config.tp_size)
        self._version, self._new_version = version, None
        for sample, task in self._following.items():
            if not task.done():
                sample.new_version(self._version)
        return self._held

    def _send(self, load_format: str, tensors: list[tuple[str, torch.Tensor]], **options: bool | str) -> None:
        # Serialised once for each rank: a handle can be opened once.
        payloads = [MultiprocessingSerializer.serialize(tensors) for _ in range(self._config.tp_size)]
        message = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=load_format, **{"flush_cache": False, **options}
        )
        self._request("update_weights_from_tensor", message)

    def _request(self, method: str, message: object) -> None:
        """RuntimeError where SGLang replies that it did not do something; it raises nothing itself."""
        success, text = self._run(getattr(self._manager, method)(message, None))
        if not success:
            raise RuntimeError(f"sglang: {method} failed: {text}")

    def held_checksums(self, names: Sequence[str]) -> dict[str, int]:
        """See the base class; they were computed at the end of the last update."""
        return {name: self._held[name] for name in names if name in self._held}

    def _release(self) -> bool:
        if not self._config.enable_memory_saver:
            return False
        # A scheduler that still works at something would end its process, and this one with it.
        reply = self._run(self._manager.flush_cache(timeout_s=_STEP_SECONDS * 10))
        if not reply.success:
            raise RuntimeError("sglang: flush_cache failed: requests are still running")
        request = io_struct.ReleaseMemoryOccupationReqInput(tags=["weights", "kv_cache"])
        self._run(self._manager.release_memory_occupation(request, None))
        return True

    def _resume(self, parts: list[str]) -> None:
        request = io_struct.ResumeMemoryOccupationReqInput(tags=parts)
        self._run(self._manager.resume_memory_occupation(request, None))

    def shutdown(self) -> None:
        """End SGLang's processes and tasks."""
        if self._engine is None:
            return
        self._engine.shutdown()
        self._end(asyncio.all_tasks(self._loop))
        self._following.clear()
        self._engine = None
