"""From logits to one token a row, and its log-probability under the distribution it was drawn from.

Order of the settings: repetition penalty, ban of stop tokens before ``min_new_tokens``, temperature, min-p, top-k,
top-p (on what min-p and top-k left, renormalised).  A token is drawn by inverting the cumulative distribution at one
uniform number per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from roll.strategies.hf_infer.rows import RunningRows
from roll.strategies.random_streams import uniforms
from roll.strategies.token_distribution import filter_threshold, invert_cumulative, penalise_repetition


class Sampler:
    """Samples for the active rows of ``rows``; keeps which tokens each row has seen where a repetition penalty asks."""

    def __init__(self, rows: RunningRows, vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._device = device
        self._seen: torch.Tensor | None = None
        self._settings = _Settings(rows, device)

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """A sample has started in ``row``."""
        if self._rows.repetition_penalty[row] == 1:
            return
        if self._seen is None:
            shape = (self._rows.capacity, self._vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        self._seen[row] = False
        self._seen[row, torch.tensor(prompt, device=self._device)] = True

    def move(self, destination: np.ndarray, source: np.ndarray) -> None:
        """Rows have changed places."""
        if self._seen is not None:
            self._seen[torch.from_numpy(destination)] = self._seen[torch.from_numpy(source)]

    def sample(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Draw a token for every active row.

        Args:
            logits: (size, vocab_size), any float dtype; may be overwritten.

        Returns:
            tokens int64 (size,), log-probs float64 (size,), on the host.
        """
        rows = self._rows
        if self._settings.epoch != rows.epoch:
            self._settings = _Settings(rows, self._device)
        settings = self._settings
        logits = logits.float()
        if settings.penalty is not None:
            assert self._seen is not None
            logits = penalise_repetition(logits, self._seen[: rows.size], settings.penalty)
        logits = self._ban_stop_tokens(logits)
        if settings.all_greedy:
            distribution = logits.log_softmax(-1)
            log_probs, tokens = distribution.max(-1)
        else:
            tokens, probs = self._draw(logits, settings)
            log_probs = probs.gather(1, tokens[:, None])[:, 0].log()
            distribution = probs
        if settings.most_top:
            self._record_likeliest(distribution if settings.all_greedy else distribution.log(), settings.most_top)
        if settings.penalty is not None and self._seen is not None:
            self._seen[torch.arange(rows.size, device=self._device), tokens] = True
        # One transfer; ids and float32 log-probs are exact in float64.
        host = torch.stack((tokens.double(), log_probs.double())).cpu().numpy()
        return host[0].astype(np.int64), host[1]

    def _ban_stop_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        rows, n = self._rows, self._rows.size
        early = rows.generated[:n] < rows.min_new[:n]
        if not early.any():
            return logits
        row, column = np.nonzero((rows.stop_ids[:n] >= 0) & early[:, None])
        banned = torch.from_numpy(rows.stop_ids[row, column]).to(self._device)
        logits[torch.from_numpy(row).to(self._device), banned] = -torch.inf
        return logits

    def _draw(self, logits: torch.Tensor, settings: _Settings) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows
        scaled = logits if settings.temperature is None else logits / settings.temperature[:, None]
        if settings.filters:
            threshold = filter_threshold(scaled, settings.top_k, settings.top_p, settings.min_p)
            scaled = scaled.masked_fill(scaled < threshold[:, None], -torch.inf)
        probs = scaled.softmax(-1)
        draws = uniforms(rows.stream_keys[: rows.size], rows.generated[: rows.size])
        # Of a row that is not finite any token does: its log-prob says so.
        tokens = invert_cumulative(probs, torch.from_numpy(draws).to(self._device)).clamp_(0, self._vocab_size - 1)
        if settings.greedy is not None:
            tokens = torch.where(settings.greedy, logits.argmax(-1), tokens)
        return tokens, probs

    def _record_likeliest(self, log_probs: torch.Tensor, count: int) -> None:
        """Note the likeliest tokens of the rows that ask for them."""
        values, tokens = log_probs.topk(min(count, self._vocab_size), dim=-1)
        value_rows, token_rows = values.tolist(), tokens.tolist()
        for row in np.flatnonzero(self._rows.num_top[: self._rows.size]):
            wanted = int(self._rows.num_top[row])
            likeliest = list(zip(token_rows[row][:wanted], value_rows[row][:wanted], strict=True))
            self._rows.samples[row].top_log_probs.append(likeliest)


class _Settings:
    """The active rows' settings on the device; None or False where no row asks for one."""

    def __init__(self, rows: RunningRows, device: torch.device) -> None:
        n = rows.size
        self.epoch = rows.epoch

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[:n].copy()).to(device)

        temperature = rows.temperature[:n]
        greedy = temperature == 0
        self.all_greedy = bool(greedy.all())
        self.greedy = on_device(greedy) if greedy.any() else None
        plain = bool(((temperature == 1) | greedy).all())
        self.temperature = None if plain else on_device(np.where(greedy, np.float32(1), temperature))
        self.top_k = on_device(rows.top_k) if (rows.top_k[:n] > 0).any() else None
        self.top_p = on_device(rows.top_p) if (rows.top_p[:n] < 1).any() else None
        self.min_p = on_device(rows.min_p) if (rows.min_p[:n] > 0).any() else None
        self.filters = self.top_k is not None or self.top_p is not None or self.min_p is not None
        penalised = bool((rows.repetition_penalty[:n] != 1).any())
        self.penalty = on_device(rows.repetition_penalty) if penalised else None
        self.most_top = int(rows.num_top[:n].max(initial=0))
