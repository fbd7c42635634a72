"""The policy's worker: log-probs, updates, and the sending half of weight sync."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from roll.algorithms.aggregation import LossDenominators, needs_groups
from roll.algorithms.loss_types import LossInputs
from roll.algorithms.losses import ActorLossOptions, actor_loss, actor_loss_options
from roll.distributed import Dispatch, register
from roll.platforms import current_platform
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, merge_metrics
from roll.strategies.base import Output, TensorBatch, WeightSelection
from roll.weight_sync.engines import RayEngines
from roll.weight_sync.messages import LostEngines, SyncReport, WeightSyncError
from roll.weight_sync.options import SyncOptions, build_transport
from roll.weight_sync.sender import Update, WeightSender
from roll.workers.model import MODEL_COLUMNS
from roll.workers.training import TrainingWorker, mini_batches

LOSS_COLUMNS = (
    "loss_mask",
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "sample_weights",
    "policy_mask",
    "group_ids",
)


class ActorWorker(TrainingWorker):
    """``actor_train`` on one rank. ``context.extra["loss"]``: the YAML keys that its loss is made from;
    ``["old_is_rollout"]``: its old log-probs are the engine's."""

    _sender: WeightSender | None = None

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS + LOSS_COLUMNS)
    def update(self, batch: DataProto) -> Metrics:
        """Collective. ``meta_info["mini_batches"]`` optimizer steps over the rows, ``meta_info["epochs"]`` times.

        ``meta_info["entropy_loss_coef"]``, where it is there, is the step's weight of the entropy bonus.
        """
        options = actor_loss_options(self.context.extra["loss"])
        if "entropy_loss_coef" in batch.meta_info:
            options = replace(options, entropy_loss_coef=batch.meta_info["entropy_loss_coef"])
        shares = mini_batches(batch.batch, batch.meta_info["mini_batches"])
        groups = None
        modes = (options.loss_agg_mode, options.kl_loss_agg_mode, options.entropy_loss_agg_mode)
        if any(mode is not None and needs_groups(mode) for mode in modes):
            groups = [share["group_ids"] for share in shares], int(batch.meta_info["num_groups"])
        masks = [share["loss_mask"] for share in shares]
        denominators = self.denominators(masks, batch.meta_info["norm_length"], groups)
        outputs = [Output.LOG_PROBS] + ([Output.ENTROPY] if options.needs_entropy or options.log_entropy else [])
        metrics = []
        for _ in range(batch.meta_info["epochs"]):
            for share, denominator in zip(shares, denominators, strict=True):
                loss = partial(
                    policy_update_loss,
                    options=options,
                    denominators=denominator,
                    old_is_rollout=bool(self.context.extra.get("old_is_rollout")),
                )
                temperature = batch.meta_info["temperature"]
                metrics.append(self.optimizer_step(share, loss, outputs, temperature, prefix="actor/"))
        return merge_metrics(metrics)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(
        self, engines: dict[int, Any], version: int, base_version: int | None, options: SyncOptions
    ) -> SyncReport | LostEngines | None:
        """Collective. Rank 0 sends the policy to ``engines`` and verifies it; the others help to gather.

        Args:
            base_version: what all of the engines hold; None: they are sent everything.
        """
        selection = WeightSelection(base_version is not None, options.adapters_apart)
        buckets = self.strategy.named_full_weights(options.bucket_bytes, selection)
        if self.rank_info.rank == 0:
            scalings = self.strategy.adapter_scalings() if options.adapters_apart else {}
            update = Update(version, options.deadline, base_version, scalings, options.patience)
            try:
                return self._weight_sender(options).send(buckets, RayEngines(engines), update)
            except WeightSyncError as error:
                # The other ranks take part in the rest of the gathering, so this one must: the update may be repeated.
                for _ in buckets:
                    pass
                if error.lost:
                    return LostEngines(error.lost, str(error))
                raise
        for _ in buckets:
            pass
        return None

    def _weight_sender(self, options: SyncOptions) -> WeightSender:
        """Made at the first update; it stays, with its connections and what it remembers."""
        if self._sender is None:
            backend, host = current_platform().collective_backend, self.context.master_addr
            transport = build_transport(options.transport, options.directory, backend, host)
            self._sender = WeightSender(transport, options.bucket_bytes, delta=options.mode == "delta")
        return self._sender


def policy_update_loss(
    outputs: TensorBatch,
    batch: TensorBatch,
    options: ActorLossOptions,
    denominators: LossDenominators,
    old_is_rollout: bool = False,
) -> tuple[torch.Tensor, Metrics]:
    """The actor's loss as a strategy's :class:`~roll.strategies.base.LossFunction`."""
    inputs = LossInputs(
        log_probs=outputs[Output.LOG_PROBS],
        entropy=outputs.get(Output.ENTROPY),
        mask=batch["loss_mask"],
        **{name: batch.get(name) for name in LOSS_COLUMNS if name not in ("loss_mask", "advantages")},
        advantages=batch["advantages"],
        old_is_rollout=old_is_rollout,
    )
    result = actor_loss(inputs, options, denominators)
    return result.loss, result.metrics
