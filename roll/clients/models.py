"""The clients of the workers of a configuration: models that learn or compute, and generation engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from roll.clients.workers import ENGINES, POLICY, Future, Workers
from roll.config.strategies.registry import BACKENDS, backend_of
from roll.methods.base import LOG_PROBS, Ask, Loss, SampledLoss
from roll.pipelines.files import export_model
from roll.pipelines.model_calls import GENERATION, TRAINING, WEIGHTS, dealt_out, read_by, start_computing, update_model
from roll.protocol import DataProto
from roll.protocol.metrics import to_floats
from roll.rollout.groups import FinishedGroup
from roll.strategies.base import StateKind, TensorBatch
from roll.strategies.engines.requests import GenerationRequest, SamplingParams, check_sampling_params
from roll.workers.model import ModelWorker, TrainWorker

R = TypeVar("R")


class EngineClient:
    """The generation engines of a configuration, under any strategy.

    Args:
        role: ``actor_infer``.

    Raises:
        ValueError: the workers have no such role.
    """

    def __init__(self, workers: Workers, role: str = ENGINES) -> None:
        workers.cluster(role, generates=True)
        self._workers = workers
        self.role = role
        self.order = workers.orders[role]
        """Held while requests are handed over, or weights."""

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], num_samples: int = 1
    ) -> Future[list[FinishedGroup]]:
        """Sample ``num_samples`` responses to each prompt.

        Args:
            prompts: token ids of each.
            params: of all prompts, or of each. With a ``seed`` in it sample i is drawn from the stream (seed, i),
                whatever else the engines have to do.

        Returns:
            For each prompt the flat arrays ``token_ids`` int32 and ``log_probs`` float32, under the distribution
            sampled from, with ``lengths`` int64 (num_samples,); ``texts`` and ``finish_reasons``.

        Raises:
            ValueError: no token in a prompt, or sampling parameters outside their range.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            check_sampling_params(own, f"prompt {index}")
            if not len(prompt):
                raise ValueError(f"prompt {index}: no token; a model continues at least one")
            requests.append(GenerationRequest(str(index), prompt, own, num_samples))
        return self._workers.calls.begin(self._sampled(requests))

    async def _sampled(self, requests: Sequence[GenerationRequest]) -> list[FinishedGroup]:
        async with AsyncExitStack() as stack:
            # Held only until the engines have the requests, so that weights can be exchanged while they generate.
            async with self.order:
                await stack.enter_async_context(self._workers.turns.needing({self.role: GENERATION}))
                generations = [self._workers.engines.submit(request) for request in requests]
            groups = await asyncio.gather(*generations)
        return [group for group in groups if group is not None]

    async def exchange(self, transfer: Callable[[], R]) -> R:
        """Have ``transfer`` give the engines other weights; samples under way go on with them."""
        engines = self._workers.engines
        await engines.pause()
        # Restarted engines have the weights of the start: they rejoin right before those are replaced.
        engines.readmit()
        result = await asyncio.to_thread(transfer)
        await engines.resume()
        return result


class TrainClient:
    """A role that learns (``actor_train``, ``critic``, ``sft_train`` ...), or one that only computes
    (``reference`` ...).

    Raises:
        ValueError: the workers have no such role.
    """

    def __init__(self, workers: Workers, role: str = POLICY) -> None:
        self._workers = workers
        self._cluster = workers.cluster(role, generates=False)
        self._order = workers.orders[role]
        self._prefix = ""
        self.role = role

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, whose number divides that of the rows of every batch."""
        return self._cluster.dp_size

    def forward(self, batch: DataProto, ask: Ask = LOG_PROBS) -> Future[TensorBatch]:
        """Columns without gradient, float32 (B, L), 0 outside ``response_mask``: log-probs, entropies, values, or the
        most probable tokens.

        Samples (rows with ``group_ids``) are distributed over the ranks in shares of equal work, other rows in their
        order. The batch is read as it is now: columns that are added later do not count.
        """
        read = read_by(self.role, ask, batch).select()

        def computed() -> TensorBatch:
            if "group_ids" in read.batch:
                return TensorBatch(start_computing(read, self._cluster, ask)())
            return TensorBatch(self._cluster.call(ModelWorker.forward, read, ask).result().batch)

        return self._begin(WEIGHTS, computed)

    def step(self, batch: DataProto, loss: Loss, mini_batches: int = 1, epochs: int = 1) -> Future[dict[str, float]]:
        """Optimizer steps on a batch: ``epochs`` passes, with a step on each of ``mini_batches`` equal parts.

        The rows of a :class:`~roll.methods.base.SampledLoss` are distributed over the ranks as in a run, those of
        other losses in their order. An update that is skipped, since loss or gradient are not finite, counts in
        ``skipped_updates``.

        Returns:
            The metrics of the loss, ``grad_norm`` and ``lr``, means over the steps.

        Raises:
            ValueError: a role that does not learn.
        """
        self._check_learns()
        batch = batch.select()

        def stepped() -> dict[str, float]:
            if isinstance(loss, SampledLoss):
                return to_floats(update_model(batch, self._cluster, loss, mini_batches, epochs))
            call = self._cluster.call(TrainWorker.step, batch, loss, mini_batches=mini_batches, epochs=epochs)
            return to_floats(call.result())

        return self._begin(TRAINING, stepped)

    def forward_backward(self, batch: DataProto, loss: Loss) -> Future[dict[str, float]]:
        """The first half of :meth:`step`: compute a loss, and add its gradient to those since the last optimizer step.

        Each loss is divided by the tokens, samples or pairs of its own batch; gradients are added.

        Returns:
            The metrics of the loss.

        Raises:
            ValueError: a role that does not learn, or whose strategy does both halves at once.
        """
        self._check_accumulates()
        batch = batch.select()

        def added() -> dict[str, float]:
            self._prefix = loss.prefix
            if isinstance(loss, SampledLoss):
                shares, lengths = dealt_out(batch, self._cluster, 1)
                counted = replace(loss, num_groups=int(batch.batch["group_ids"].max()) + 1)
                call = self._cluster.call(TrainWorker.backward, shares, counted)
                return to_floats(call.result() | lengths)
            return to_floats(self._cluster.call(TrainWorker.backward, batch, loss).result())

        return self._begin(TRAINING, added)

    def optim_step(self) -> Future[dict[str, float]]:
        """The second half of :meth:`step`: clip the sum of the gradients, and take an optimizer step.

        Returns:
            ``grad_norm`` and ``lr``, after the prefix of the last loss.

        Raises:
            ValueError: as :meth:`forward_backward`.
        """
        self._check_accumulates()
        return self._begin(
            TRAINING, lambda: to_floats(self._cluster.call(TrainWorker.optimizer_step, self._prefix).result())
        )

    def save(self, folder: str | Path) -> Future[None]:
        """Write everything that is needed to go on: weights, optimizer, schedule, random states."""
        self._check_learns()

        def saved() -> None:
            self._cluster.call_all(TrainWorker.save_checkpoint, str(Path(folder).absolute())).result()
            # The call above returns when the state is copied to host memory; this one waits for the disk.
            self._cluster.call_all(TrainWorker.checkpoint_saved, True).result()

        return self._begin(TRAINING, saved)

    def load(self, folder: str | Path) -> Future[None]:
        """Go on from what :meth:`save` has written, or from the role's folder in a checkpoint of a run."""
        self._check_learns()

        def loaded() -> None:
            self._cluster.call_all(TrainWorker.load_checkpoint, str(Path(folder).absolute())).result()

        return self._begin(TRAINING, loaded)

    def export(self, folder: str | Path) -> Future[None]:
        """Write the model and its tokenizer in Hugging Face format."""
        work = partial(export_model, self._cluster, self._workers.tokenizer, Path(folder).absolute())
        return self._begin(WEIGHTS, work)

    def send_weights(self, engine: EngineClient) -> Future[dict[str, float]]:
        """Give the engines the policy's weights, and verify what they hold. Samples of later calls come from them;
        those under way go on with them.

        Raises:
            ValueError: another role than the policy.
        """
        if self.role != POLICY:
            raise ValueError(f"role {self.role!r}: engines have the weights of {POLICY}")

        # No turn of the engines may be in flight while they are brought to the policy's weights.
        async def sent() -> dict[str, float]:
            workers = self._workers
            needs = {POLICY: WEIGHTS, engine.role: WEIGHTS}
            async with engine.order, self._order, self._workers.turns.needing(needs):
                return to_floats(await engine.exchange(lambda: workers.weight_sync.sync(next(workers.versions))))

        return self._workers.calls.begin(sent())

    def _begin(self, states: frozenset[StateKind], work: Callable[[], R]) -> Future[R]:
        """Begin blocking work of the role, after what was begun before."""

        async def done() -> R:
            async with self._order, self._workers.turns.needing({self.role: states}):
                return await asyncio.to_thread(work)

        return self._workers.calls.begin(done())

    def _check_accumulates(self) -> None:
        self._check_learns()
        strategy = self._cluster.role.strategy_args.strategy_name
        if not backend_of(strategy).accumulates:
            able = ", ".join(backend.names[0] for backend in BACKENDS.rows if backend.accumulates)
            raise ValueError(
                f"{self.role}.strategy_args.strategy_name: {strategy} computes a gradient and takes its step at once: "
                f"call step, or use one of {able}"
            )

    def _check_learns(self) -> None:
        training = self._workers.plan.training
        if self.role not in training:
            raise ValueError(f"role {self.role!r} does not learn; in this configuration {', '.join(training)} does")
