"""The Ray worker of a generation role: an engine that works in turns, and the quarantine of requests that fail."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from roll.distributed import Dispatch, Worker, register
from roll.rewards.thoughts import response_decoder
from roll.rollout.groups import EngineCommand, EngineReport, FinishedGroup
from roll.strategies.base import create_generation_strategy
from roll.strategies.engines.base import GenerationStrategy
from roll.strategies.engines.requests import (
    GenerationOutput,
    GenerationRequest,
    PromptScore,
    SamplingParams,
    interrupted,
    visible_text,
)
from roll.weight_sync.encoding import BucketHeader, Checksum, ChecksumKind, Update
from roll.weight_sync.transports import WeightReceiver

logger = logging.getLogger(__name__)

_PROBE_STEPS = 100

_Complete = tuple[GenerationRequest, list[GenerationOutput]]


class GenerationWorker(Worker):
    """Runs one engine. Each :meth:`advance` call is a turn; the driver keeps one turn in flight per busy engine."""

    engine: GenerationStrategy

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        role = self.context.role
        torch.set_grad_enabled(False)
        self.tokenizer = AutoTokenizer.from_pretrained(
            role.model_args.model_name_or_path, trust_remote_code=role.model_args.trust_remote_code
        )
        self._decode = response_decoder(self.tokenizer)
        self.engine = create_generation_strategy(role, seed=self.context.seed + self.context.rank)
        self.receiver = WeightReceiver(self.engine)
        self.engine.initialize()
        self._open: dict[str, GenerationRequest] = {}
        self._finished: dict[str, list[GenerationOutput]] = {}
        self._quarantine = Quarantine(self.engine, self._begun)
        self._counts: Counter[str] = Counter()  # of the engine, at the last report

    def advance(self, command: EngineCommand) -> EngineReport:
        """Take the turn that ``command`` describes; groups are reported when their last sample is done."""
        recalled, refused = self._accept(command)  # outside of the time that counts as busy
        begin = time.perf_counter()
        complete: list[_Complete] = []
        while command.work and self._quarantine.has_work:
            for output in self._step(command.report_refusals, refused):
                samples = self._finished[output.request_id]
                samples.append(output)
                if len(samples) == self._open[output.request_id].num_samples:
                    del self._finished[output.request_id]
                    # Samples end in any order; their place in the group must not depend on timing.
                    samples.sort(key=lambda sample: sample.sample_index)
                    complete.append((self._open.pop(output.request_id), samples))
            if (complete or refused or command.watch) and time.perf_counter() - begin >= command.slice_seconds:
                break
            # Though nothing is complete: aborts, recalls and new requests reach the engine with its next command only.
            if time.perf_counter() - begin >= 10 * command.slice_seconds:
                break
        before, self._counts = self._counts, Counter(self.engine.counts)
        request_ids = [request_id for request_id in command.watch if request_id in self._open]
        progress = {request_id: list(self._finished[request_id]) for request_id in request_ids}
        for output in self.engine.running(request_ids) if request_ids else []:
            progress[output.request_id].append(output)
        return EngineReport(
            groups=[*(FinishedGroup.empty(*failure) for failure in refused.items()), *self._pack(complete)],
            recalled=recalled,
            progress=progress,
            num_unfinished=self.engine.num_unfinished,
            busy_seconds=time.perf_counter() - begin,
            counts=self._counts - before,
        )

    def _step(self, report_failures: bool, refused: dict[str, str]) -> list[GenerationOutput]:
        """One step of the engine; requests that fail by themselves go to ``refused``, by id with the reason, or are
        raised where the command does not set ``report_refusals``."""
        failed: dict[str, str] = {}
        outputs = self._quarantine.step(failed) if report_failures else self.engine.step()
        failed |= self.engine.take_failures()
        for request_id, why in failed.items():
            if not report_failures:
                raise RuntimeError(f"request {request_id!r} has failed: {why}")
            if self._open.pop(request_id, None) is not None:
                del self._finished[request_id]
                refused[request_id] = why
        return [output for output in outputs if output.request_id not in failed]

    def _begun(self, outputs: Sequence[GenerationOutput]) -> list[GenerationRequest]:
        """The open requests that the engine had, to be added again with what their samples have."""
        begun = []
        for request_id, request in self._open.items():
            if self._quarantine.waiting(request_id) is None:
                mine = [output for output in outputs if output.request_id == request_id]
                begun.append(interrupted(request, mine, self._finished[request_id]))
        return begun

    def _accept(self, command: EngineCommand) -> tuple[list[GenerationRequest], dict[str, str]]:
        if command.abort:
            self.engine.abort(command.abort)
            for request_id in command.abort:
                self._quarantine.drop(request_id)
                self._open.pop(request_id, None)
                self._finished.pop(request_id, None)
        recalled = []
        for request_id in command.recall:
            if request_id not in self._open:
                continue
            request, finished = self._open.pop(request_id), self._finished.pop(request_id)
            waiting = self._quarantine.waiting(request_id)
            if waiting is None:
                recalled.append(interrupted(request, self.engine.abort([request_id]), finished))
            else:
                self._quarantine.drop(request_id)
                recalled.append(waiting)
        refused: dict[str, str] = {}
        if command.add and not command.report_refusals:
            self.engine.add_requests(command.add)
        for request in command.add if command.report_refusals else ():
            if self._quarantine.is_open:
                # In the engine beside a suspect it would become a suspect itself when a step raises.
                self._quarantine.newcomers.append(request)
                continue
            try:
                self.engine.add_requests([request])
            except ValueError as error:
                refused[request.request_id] = str(error)
            except Exception as error:  # of the engine's own, about this request
                refused[request.request_id] = f"{type(error).__name__}: {error}"
        for request in command.add:
            if request.request_id not in refused:
                self._open[request.request_id] = request
                # A request that was recalled brings along the samples that had ended by then.
                self._finished[request.request_id] = list(request.finished)
        return recalled, refused

    def _pack(self, complete: list[_Complete]) -> list[FinishedGroup]:
        if not complete:
            return []
        # All texts at once: the tokenizer decodes a list faster than its parts.
        token_ids = [sample.token_ids for _, samples in complete for sample in samples]
        texts = iter(self._decode(token_ids))
        return [
            FinishedGroup.from_samples(samples, [visible_text(next(texts), request.params) for _ in samples])
            for request, samples in complete
        ]

    def prompt_score(self, arguments: tuple[Sequence[int], int]) -> PromptScore | str:
        """:meth:`GenerationStrategy.prompt_scores` of token ids and a number of tokens; or why there is none."""
        try:
            return self.engine.prompt_scores([arguments[0]], arguments[1])[0]
        except ValueError as error:
            return str(error)

    def start_weight_update(self, start: Update) -> ChecksumKind:
        return self.receiver.start(start)

    def update_weights(self, header: BucketHeader, payload: object) -> None:
        """Take over one bucket. Its tensors may be views of read-only shared memory; the engine copies them."""
        self.receiver.update(header, payload)

    def finish_weight_update(self, unsent: Sequence[str] = ()) -> dict[str, Checksum]:
        """Make the new weights current; a checksum per tensor of what the engine now holds, ``unsent`` included."""
        return self.receiver.finish(unsent)

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        self.engine.sleep()

    @register(Dispatch.ONE_TO_ALL)
    def wake(self, weights_only: bool = False) -> None:
        self.engine.wake(weights_only)

    def close(self) -> None:
        """Free the engine when the cluster shuts down."""
        if hasattr(self, "engine"):
            self.receiver.close()
            self.engine.shutdown()


class Quarantine:
    """Steps an engine; when a step raises, the requests that it had are tried again in halves until those that fail by
    themselves are found.  A group has the engine to itself, so that it is the group's fault when a step raises again.

    An error that a plain request meets as well is the engine's own and is raised.

    Args:
        engine: takes the steps.
        begun: gives the open requests, with what their samples have, in the form that lets an engine continue them.
    """

    def __init__(
        self, engine: GenerationStrategy, begun: Callable[[Sequence[GenerationOutput]], list[GenerationRequest]]
    ) -> None:
        self._engine, self._begun = engine, begun
        self._suspects: deque[list[GenerationRequest]] = deque()
        self.newcomers: list[GenerationRequest] = []  # new requests, which wait until no suspect is left
        self._tries_suspects = False

    @property
    def has_work(self) -> bool:
        return bool(self._engine.num_unfinished or self._suspects or self.newcomers)

    @property
    def is_open(self) -> bool:
        """True while suspects are being tried: new requests wait then."""
        return bool(self._suspects) or (self._tries_suspects and self._engine.num_unfinished > 0)

    def drop(self, request_id: str) -> None:
        groups = ([one for one in group if one.request_id != request_id] for group in self._suspects)
        self._suspects = deque(group for group in groups if group)
        self.newcomers = [request for request in self.newcomers if request.request_id != request_id]

    def waiting(self, request_id: str) -> GenerationRequest | None:
        """A request that the engine does not have at the moment."""
        everyone = (one for group in (*self._suspects, self.newcomers) for one in group)
        return next((one for one in everyone if one.request_id == request_id), None)

    def step(self, failed: dict[str, str]) -> list[GenerationOutput]:
        """One step of the engine; ``failed`` takes the requests that have failed by themselves, by id, and why."""
        if not self._engine.num_unfinished:
            self._tries_suspects = bool(self._suspects)
            group = self._suspects.popleft() if self._suspects else self.newcomers
            if group is self.newcomers:
                self.newcomers = []
            for request in group:
                try:
                    self._engine.add_requests([request])
                except Exception as error:
                    failed[request.request_id] = f"{type(error).__name__}: {error}"
        try:
            return self._engine.step()
        except Exception as error:
            begun = self._begun(self._engine.recover())
            logger.warning("a step of the engine has failed with %d requests: %s", len(begun), error, exc_info=error)
            self._probe(error)
            if len(begun) == 1:
                failed[begun[0].request_id] = f"{type(error).__name__}: {error}"
            elif begun:
                middle = len(begun) // 2
                # extendleft reverses: the first half comes out first.
                self._suspects.extendleft([begun[middle:], begun[:middle]])
            return []

    def _probe(self, error: Exception) -> None:
        """Raise ``error`` if the engine fails at a plain request as well."""
        name = "probe"
        try:
            self._engine.add_requests([GenerationRequest(name, [0], SamplingParams(1, temperature=0.0))])
            for _ in range(_PROBE_STEPS):
                self._engine.step()
                if not self._engine.num_unfinished:
                    break
        except Exception:
            raise error from None
        if self._engine.num_unfinished or name in self._engine.take_failures():
            raise error
