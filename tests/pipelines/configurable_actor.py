"""An actor whose loss can be changed while it runs, so that many algorithms share one start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll.distributed import Dispatch, register
from roll.workers.training import ActorWorker


class ConfigurableActor(ActorWorker):
    """As ``ActorWorker``, which makes its loss from the YAML keys in ``context.extra["loss"]`` at every update."""

    @register(Dispatch.ONE_TO_ALL)
    def use_loss(self, keys: Mapping[str, Any]) -> None:
        self.context = replace(self.context, extra={**self.context.extra, "loss": keys})
