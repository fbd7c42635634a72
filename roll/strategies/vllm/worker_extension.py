"""Taking over weights, inside vLLM's worker: what vLLM mixes into the class that holds the model.

vLLM fuses matrices (query, key and value; gate and up) and, on a CPU, packs them for oneDNN, after which the values
cannot be read back.  So an update goes through its layer-by-layer reload: a layer whose tensors are all there is
loaded into plain parameters, compared there with what was sent, and only then packed; a packed layer is asked for one
product to see that the packing took place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from roll.strategies.vllm.verification import ReloadVerifier


class WeightReceiver:
    """Methods for ``collective_rpc``. Attributes stand in vLLM's own class, hence the prefix."""

    model_runner: Any
    _roll_verifier: ReloadVerifier | None = None

    def roll_start_weight_update(self) -> None:
        model = self.model_runner.model
        initialize_layerwise_reload(model)
        self._roll_verifier = ReloadVerifier(model)

    @torch.no_grad()
    def roll_update_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load full tensors by Hugging Face name.

        Raises:
            ValueError: a name that the model does not have.
        """
        verifier = self._roll_verifier
        assert verifier is not None, "no update has been started"
        device = self.model_runner.device

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors.items():
                # A copy: its layer may wait for a tensor of the next bucket, and this may be shared memory.
                received = tensor.to(device, copy=True)
                verifier.expect(name, received)
                yield name, received

        self.model_runner.model.load_weights(arriving())

    @torch.no_grad()
    def roll_finish_weight_update(self) -> dict[str, int]:
        """Checksum, as sent, of every tensor that the model now holds."""
        verifier, self._roll_verifier = self._roll_verifier, None
        assert verifier is not None, "no update has been started"
        finalize_layerwise_reload(self.model_runner.model, self.model_runner.model_config)
        return verifier.finish()
