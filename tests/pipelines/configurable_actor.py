"""An actor whose loss can be changed while it runs, so that many algorithms share one start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll.algorithms.losses import actor_loss_options
from roll.distributed import Dispatch, register
from roll.workers.training import ActorWorker


class ConfigurableActor(ActorWorker):
    """As ``ActorWorker``, with a loss that is made again from YAML keys."""

    @register(Dispatch.ONE_TO_ALL)
    def use_loss(self, keys: Mapping[str, Any]) -> None:
        self.settings = replace(self.settings, loss=actor_loss_options(keys))
