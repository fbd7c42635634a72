"""The engine of ``strategy_name: noisy``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from roll.strategies.hf_infer import HfInferStrategy
from roll.strategies.hf_infer.rows import Places, Sampler
from roll_example_plugin.strategies import NoisyConfig


class NoisyEngine(HfInferStrategy):
    """``hf_infer`` whose samples and log-probs are those of logits with normal noise, as if its kernels were not
    the trainer's. Greedy samples are without it."""

    _config: NoisyConfig

    def _new_sampler(self) -> Sampler:
        made = self._decoder
        generator = torch.Generator(made.device).manual_seed(self.seed)
        own = self._rows, made.vocab_size, made.device, made.masked_token_ids, made.is_invariant
        return NoisySampler(self._config.noise, generator, *own)


class NoisySampler(Sampler):
    def __init__(self, deviation: float, generator: torch.Generator, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._deviation, self._generator = deviation, generator

    def sample(self, logits: torch.Tensor, places: Places) -> tuple[np.ndarray, np.ndarray]:
        noise = torch.randn(logits.shape, generator=self._generator, device=logits.device) * self._deviation
        is_sampled = torch.from_numpy(self._rows.temperature[places.rows] > 0).to(logits.device)
        return super().sample(logits.float() + noise * is_sampled[:, None], places)
