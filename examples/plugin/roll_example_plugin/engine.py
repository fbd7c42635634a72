"""The engine of ``strategy_name: brief``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from roll.strategies.engines.requests import GenerationRequest
from roll.strategies.hf_infer import HfInferStrategy
from roll_example_plugin.strategies import BriefConfig


class BriefEngine(HfInferStrategy):
    """``hf_infer`` with short responses."""

    _config: BriefConfig

    def add_requests(self, requests: Iterable[GenerationRequest]) -> None:
        most = self._config.most_tokens
        super().add_requests(
            replace(one, params=replace(one.params, max_new_tokens=min(one.params.max_new_tokens, most)))
            for one in requests
        )
