"""The engine of ``strategy_name: noisy``."""

from __future__ import annotations

import numpy as np
import torch

from roll.strategies.hf_infer import HfInferStrategy
from roll.strategies.hf_infer.rows import Sampler
from roll_example_plugin.strategies import NoisyConfig


class NoisyEngine(HfInferStrategy):
    """``hf_infer`` whose samples and log-probs are those of logits with normal noise, as if its kernels were not
    the trainer's. Greedy samples are without it."""

    _config: NoisyConfig

    def _new_sampler(self) -> Sampler:
        made = self._decoder
        sampler = NoisySampler(self._rows, made.vocab_size, made.device, made.masked_token_ids, made.is_invariant)
        sampler.deviation = self._config.noise
        sampler.generator = torch.Generator(made.device).manual_seed(self.seed)
        return sampler


class NoisySampler(Sampler):
    deviation: float
    generator: torch.Generator

    def sample(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        noise = torch.randn(logits.shape, generator=self.generator, device=logits.device) * self.deviation
        is_sampled = torch.from_numpy(self._rows.temperature[: self._rows.size] > 0).to(logits.device)
        return super().sample(logits.float() + noise * is_sampled[:, None])
