"""The ``vllm`` strategy: a vLLM engine stepped from the worker's own thread."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from roll.config.roles import WorkerConfig
from roll.config.strategies.engines import VLLM, VllmStrategyConfig
from roll.platforms import current_platform
from roll.protocol.vision import VisionInputs
from roll.strategies.engines.base import PackagedEngine, RankWatch, check_version
from roll.strategies.engines.requests import (
    GenerationOutput,
    GenerationRequest,
    PromptScore,
    SamplingParams,
    check_request,
    continued,
)
from roll.strategies.vllm.arguments import (
    ImagePrompts,
    by_position,
    engine_arguments,
    recorded_routes,
    sampling_params,
)
from roll.strategies.vllm.verification import quieten
from roll.strategies.vllm.worker import POLICY, DraftCounts, RankMemory, check_results, joined_checksums
from roll.weight_sync.encoding import Checksum

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.inputs import EngineInput
    from vllm.outputs import RequestOutput

logger = logging.getLogger(__name__)

SCORING = "prompt-score/"  # prefix of vLLM's request ids of prompts that are scored


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sample in progress."""

    request_id: str
    index: int
    internal_id: str  # vLLM's own name of it
    begun: GenerationOutput | None  # tokens that it came with
    prompt_length: int  # without those


class VllmStrategy(PackagedEngine):
    """Generation by vLLM, on CPU or GPU. The engine and its scheduler are in this process, and so is its model, unless
    the engine has several ranks: these are processes that this one starts and ends. The death of one ends them all."""

    _config: VllmStrategyConfig
    _engine: LLMEngine

    def __init__(self, role: WorkerConfig, seed: int = 42) -> None:
        super().__init__(role, seed)
        self._samples: dict[str, _Sample] = {}
        self._unfinished: dict[str, set[str]] = {}  # keys of `_samples` by request
        self._scoring: dict[str, Any] = {}  # results of prompts that are scored; None until vLLM has finished
        self._finished_early: list[GenerationOutput] = []  # while such prompts were computed
        self._is_reloading = False
        self._checksums: dict[str, Checksum] = {}  # of the tensors that the update has brought so far
        self.takes_adapters = bool(self._config.engine_args.get("enable_lora"))
        self._lora = POLICY if self.takes_adapters else None
        self._num_ranks = self._config.devices_per_worker
        self._records_routes = role.router_replay.mode == "R3"
        self._num_experts = 0
        self._memory = RankMemory()
        self._drafts: DraftCounts | None = None
        self._watch = RankWatch([])

    def initialize(self) -> None:
        """See the base class; ValueError for a vLLM outside the tested versions."""
        check_version(VLLM, vllm.__version__, self._config.allow_untested_version)
        quieten()
        platform = current_platform()
        model_config, tokenizer = self._read_model_folder(self._config.max_model_len)
        if self._records_routes:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the one that can
        arguments = engine_arguments(self.role, self._config, model_config, self._max_model_len, self.seed, platform)
        self._images = ImagePrompts(model_config, tokenizer, arguments["dtype"])
        if platform.device_type == "cpu" and arguments["enforce_eager"]:
            # The sampler would still compile one helper, which needs a C++ compiler and takes seconds.
            torch.compiler.set_stance("force_eager")
        loggers: list[Any] = []
        if self._config.speculative_config is not None:
            # Read when vLLM imports numba, also in ranks of their own: numba, which looks for drafts, would set its own
            # number of OpenMP threads on a CPU, and oneDNN's products prepared for another would be wrong.
            os.environ["NUMBA_THREADING_LAYER"] = "workqueue"
            loggers = [self._count_drafts]
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=loggers)
        self._engine.set_weight_version(str(self._version))
        if self._num_ranks > 1:
            self._watch = RankWatch([rank.proc for rank in self._engine.model_executor.workers])
            self._ask_ranks("roll_begin", os.getpid())
        if self.takes_adapters:
            self._ask_ranks("roll_add_adapter")
        if self._config.speculative_config is not None:
            self._ask_ranks("roll_repair_sampling")
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._num_experts = self._engine.model_config.get_num_experts()
        cache = self._engine.vllm_config.cache_config
        logger.info(
            "vllm %s: up to %d samples of %d tokens; KV cache of %s blocks of %s tokens",
            vllm.__version__,
            self._config.max_num_seqs,
            self._max_model_len,
            cache.num_gpu_blocks,
            cache.block_size,
        )

    def add_requests(self, requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        taken = set(self._unfinished)
        # All are checked before any is added: an error must not leave half of them running.
        for request in requests:
            check_request(request, taken, self._max_model_len, self._vocab_size)
            self._images.check(f"request {request.request_id!r}", request.prompt_token_ids, request.vision)
            taken.add(request.request_id)
        for request in requests:
            # Every sample is a separate request to vLLM; tokens of a partial sample become part of its prompt.
            self._unfinished[request.request_id] = set()
            try:
                fresh = None  # rendered once, and only to be added: vLLM sends an image along with its first prompt
                for index in request.unfinished_samples:
                    begun = request.partial.get(index)
                    if begun is None:
                        prompt = fresh = fresh or self._rendered(request.prompt_token_ids, request.vision)
                    else:
                        prompt = self._rendered([*request.prompt_token_ids, *begun.token_ids], request.vision)
                    self._add_sample(request, index, prompt, begun)
            except Exception:  # vLLM has further limits: drop this request's samples and keep the others
                self.abort([request.request_id])
                self._unfinished.pop(request.request_id, None)
                raise

    def _rendered(self, token_ids: Sequence[int], vision: VisionInputs | None) -> EngineInput:
        """ValueError where vLLM sees another prompt, or other patches, than the trainer will."""
        prompt = self._images.prompt(token_ids, vision)
        if self._config.in_flight_update == "keep":
            # Blocks stay in the cache across updates. The salt enters their hashes, so that a new request never reuses
            # keys and values of older weights.
            prompt["cache_salt"] = str(self._version)
        (rendered,) = self._engine.renderer.render_cmpl([prompt])
        if vision is not None and list(rendered["prompt_token_ids"]) != list(token_ids):
            found, expected = len(rendered["prompt_token_ids"]), len(token_ids)
            raise ValueError(
                f"vllm makes {found} tokens of a prompt with images that has {expected} in training, or other ones"
            )
        return rendered

    def _add_sample(
        self, request: GenerationRequest, index: int, prompt: EngineInput, begun: GenerationOutput | None
    ) -> None:
        engine, key = self._engine, f"{request.request_id}/{index}"
        room = self._max_model_len - len(request.prompt_token_ids)
        num_begun = 0 if begun is None else len(begun.token_ids)
        limited = replace(request.params, top_log_probs=min(request.params.top_log_probs, self._vocab_size))
        params = sampling_params(limited, self._end_token_ids, room, index, num_begun)
        params.bad_words = self._images.never_sampled
        internal_id = engine.add_request(key, prompt, params, lora_request=self._lora)
        if begun is not None and request.params.stop_strings:
            # vLLM searches the generated text for stop strings, and to it these tokens are part of the prompt.
            detokenizer: Any = engine.output_processor.request_states[internal_id].detokenizer
            text = detokenizer.tokenizer.decode(list(begun.token_ids), skip_special_tokens=False)
            detokenizer.output_text = text.rstrip("\ufffd")  # a character that is not whole comes with its last token
        self._samples[key] = _Sample(request.request_id, index, internal_id, begun, len(request.prompt_token_ids))
        self._unfinished[request.request_id].add(key)

    def step(self) -> list[GenerationOutput]:
        self._check_no_update()
        early, self._finished_early = self._finished_early, []
        return self._without_failed([*early, *self._step()] if self._samples else early)

    def _step(self) -> list[GenerationOutput]:
        with self._watch.blamed():
            results: list[Any] = self._engine.step()
        for result in results:
            if result.request_id in self._scoring:
                self._scoring[result.request_id] = result
        return [self._take(result) for result in results if result.request_id not in self._scoring]

    def prompt_scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        """See the base class; samples in flight continue meanwhile, and the next step returns those that finish. Raises
        ValueError: a prompt without room for the token that vLLM samples after it, or more tokens requested than the
        engine's ``max_logprobs``."""
        engine = self._engine
        keys = [f"{SCORING}{number}" for number in range(len(prompts))]
        settings: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": 1,  # its minimum to sample
            "prompt_logprobs": min(top, self._vocab_size),
            "flat_logprobs": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        try:
            for key, token_ids in zip(keys, prompts, strict=True):
                request = GenerationRequest(key, token_ids, SamplingParams(1))
                check_request(request, (), self._max_model_len, self._vocab_size)
                rendered = self._rendered(token_ids, None)
                engine.add_request(key, rendered, vllm.SamplingParams(**settings), lora_request=self._lora)
                self._scoring[key] = None
            while any(result is None for result in self._scoring.values()):
                self._finished_early += self._step()
            found = [self._scoring[key].prompt_logprobs for key in keys]
            # The first position of a prompt has none.
            return [PromptScore(*by_position(one, 1), [one.ranks[at] for at in one.start_indices[1:]]) for one in found]
        except Exception:
            engine.abort_request([key for key, result in self._scoring.items() if result is None])
            raise
        finally:
            self._scoring = {}

    def _count_drafts(self, vllm_config: VllmConfig, engine_index: int) -> DraftCounts:
        self._drafts = DraftCounts(vllm_config, engine_index)
        return self._drafts

    @property
    def counts(self) -> Mapping[str, int]:
        """See the base class; of prompts vLLM's strategy counts nothing."""
        return {} if self._drafts is None else self._drafts.counts

    @property
    def num_unfinished(self) -> int:
        return len(self._samples) + len(self._finished_early)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """See the base class; unknown or finished requests are passed over."""
        names = list(self._unfinished if request_ids is None else request_ids)
        early = self._finished_early if request_ids is not None else []
        self._finished_early = [output for output in early if output.request_id not in names]
        results = self._so_far(names)  # before the abort: the engine forgets what an aborted request had
        internal_ids = [self._samples[result.request_id].internal_id for result in results]
        self._engine.abort_request(internal_ids, internal=True)
        return [self._take(result) for result in results]

    def recover(self) -> list[GenerationOutput]:
        """See the base class. What the prefix cache has noted of the step that failed was never computed."""
        outputs = self.abort()
        self._engine.reset_prefix_cache()
        return outputs

    def running(self, request_ids: Iterable[str]) -> list[GenerationOutput]:
        results = self._so_far(request_ids)
        return [self._output(self._samples[result.request_id], result) for result in results]

    def _so_far(self, request_ids: Iterable[str]) -> list[Any]:
        """vLLM's own account of the unfinished samples of these requests, in order, as if they ended here; it only
        reads what vLLM keeps of them."""
        states, results = self._engine.output_processor.request_states, []
        for request_id in request_ids:
            own = [self._samples[key] for key in self._unfinished.get(request_id, ())]
            for sample in sorted(own, key=lambda sample: sample.index):
                results.append(states[sample.internal_id].make_request_output([], None, FinishReason.ABORT, None))
        return results

    def _take(self, result: RequestOutput) -> GenerationOutput:
        """Output of an ended sample, which is no longer unfinished."""
        sample = self._samples.pop(result.request_id)
        keys = self._unfinished[sample.request_id]
        keys.remove(result.request_id)
        if not keys:
            del self._unfinished[sample.request_id]
        return self._output(sample, result)

    def _output(self, sample: _Sample, result: RequestOutput) -> GenerationOutput:
        own = result.outputs[0]
        token_ids, reason = list(own.token_ids), cast("Any", own.finish_reason)
        log_probs, top = by_position(own.logprobs) if token_ids else ([], [])
        assert len(log_probs) == len(token_ids), "one position of log-probs per token"
        assert reason in ("stop", "length", "abort"), reason
        spans = [(int(span.version), span.start, span.end) for span in own.weight_versions or ()]
        # vLLM reports no version where no token was sampled, and nothing further where only that token was requested.
        spans, top = spans or [(self._version, 0, len(token_ids))], top if any(top) else []
        output = GenerationOutput(sample.request_id, sample.index, token_ids, log_probs, reason, spans, top)
        whole = output if sample.begun is None else continued(sample.begun, output)
        if self._records_routes:
            before = sample.prompt_length - 1
            num_begun = 0 if sample.begun is None else before + len(sample.begun.token_ids)
            number = before + len(whole.token_ids)
            whole.routes = recorded_routes(own.routed_experts, number, self._num_experts, sample.begun, num_begun)
        return whole

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See the base class; a tensor of another dtype is converted to the engine's. ValueError for a name that the
        model does not have, RuntimeError where a rank did not take the tensors; it is named."""
        self._updating("update_weights")
        if not self._is_reloading:
            # Only with the first tensor: an update of the adapter alone must not touch the model.
            self._ask_ranks("roll_start_reload")
            self._is_reloading = True
        self._ask_ranks("roll_load", self._for_ranks(tensors))

    def update_adapter(self, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> None:
        self._updating("update_adapter")
        by_rank = self._ask_ranks("roll_replace_adapter", self._for_ranks(tensors), dict(scalings))
        self._checksums |= joined_checksums(by_rank)

    def held_checksums(self, names: Sequence[str]) -> dict[str, Checksum]:
        return joined_checksums(self._ask_ranks("roll_held_checksums", list(names)))

    def finish_weight_update(self) -> dict[str, Checksum]:
        """See the base class. The checksum of a tensor is there only if the engine holds exactly that tensor."""
        version, engine = self._updating("finish_weight_update"), self._engine
        if self._is_reloading:
            self._checksums |= joined_checksums(self._ask_ranks("roll_finish_reload"))
            self._is_reloading = False
        if self._num_ranks > 1:
            self._memory.end(succeeded=False)
            self._ask_ranks("roll_close_memory")
        engine.reset_encoder_cache()  # of the vision tower as it was
        if self._config.in_flight_update == "recompute":
            # Running requests are preempted as well: a block in use could not be dropped.
            engine.reset_prefix_cache(reset_running_requests=True)
        engine.set_weight_version(str(version))
        self._version, self._new_version = version, None
        checksums, self._checksums = self._checksums, {}
        return checksums

    def _for_ranks(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Put the tensors into shared memory if ranks are processes: vLLM's RPC would pickle them for each."""
        return self._memory.pack(tensors) if self._num_ranks > 1 else dict(tensors)

    def _ask_ranks(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of the worker extension; one result a rank."""
        with self._watch.blamed():
            results = self._engine.collective_rpc(method, args=arguments)
            check_results(results)
        return results

    def _release(self) -> bool:
        with self._watch.blamed():
            self._engine.sleep(self._config.sleep_level)
        return True

    def _resume(self, parts: list[str]) -> None:
        with self._watch.blamed():
            self._engine.wake_up(parts)

    def shutdown(self) -> None:
        if not hasattr(self, "_engine"):
            return
        self._watch.close()
        self._engine.engine_core.shutdown()
        self._memory.end(succeeded=False)
        del self._engine
        self._samples.clear()
        self._unfinished.clear()
        gc.collect()
