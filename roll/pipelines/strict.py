"""The certificate of a run with ``strict_on_policy``: which log-probs of engine and trainer had the same bits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from roll.config.loader import LoadedConfig
from roll.config.policy import PolicyRunConfig
from roll.config.reading.errors import ConfigError
from roll.methods.losses import COMPARED_TOKENS, SAME_WEIGHTS, UNEQUAL
from roll.methods.policy_plan import PolicyPlan
from roll.pipelines.bisect_log_probs import locate
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics

CERTIFICATE = "strict_on_policy.json"


class LogProbsDiffer(RuntimeError):
    """Engine and trainer gave a token log-probs of different bits."""


class Certificate:
    """Record of what a run has compared, in ``strict_on_policy.json`` of its output folder."""

    def __init__(self, config: PolicyRunConfig, plan: PolicyPlan) -> None:
        self._path = plan.output_dir / CERTIFICATE
        self._older = 0
        trainer, engine = config.actor_train, config.actor_infer
        lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
        # Which instructions torch uses decides the last bits, and with them whom the certificate is for.
        processor = {"name": name, "instructions": torch.backends.cpu.get_cpu_capability(), "cores": os.cpu_count()}
        self._facts: dict[str, Any] = {
            "compared": "the engine's log-prob of each sampled token with the trainer's in the first optimizer step of "
            "a batch, for tokens that were sampled with the weights of that step",
            "equal": True,
            "steps": 0,
            "tokens": 0,
            "tokens_of_older_weights": 0,
            "engine": engine.strategy_args.strategy_name,
            "trainer": trainer.strategy_args.strategy_name,
            "ranks": len(trainer.device_mapping or [0]),
            "dtype": trainer.model_args.dtype,
            "model": plan.roles["actor_train"].section.model_args.model_name_or_path,
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "processor": processor,
        }

    def go_on(self) -> None:
        """Add to what the run compared before it was resumed."""
        try:
            before = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return
        self._facts |= {name: before[name] for name in ("steps", "tokens", "tokens_of_older_weights")}

    def add(self, metrics: Metrics) -> None:
        """Count a step whose update has ended well."""
        self._facts["steps"] += 1
        self._facts["tokens"] += int(metrics[COMPARED_TOKENS].value())
        self._facts["tokens_of_older_weights"] += self._older
        self._write()

    @contextmanager
    def judging(self, loaded: LoadedConfig[Any], batch: DataProto, step: int) -> Iterator[None]:
        """Have the update in the block compare what was sampled with weights ``step``; turn its failure into one that
        says in which operation the computations part.

        Raises:
            LogProbsDiffer: of a token.
        """
        tensors = batch.batch
        # Asynchronous runs also train tokens of older weights, whose log-probs differ as they must.
        same = tensors["response_mask"] & (tensors["weight_versions"] == step)
        tensors[SAME_WEIGHTS] = same
        self._older = int((tensors["response_mask"] & ~same).sum())
        try:
            yield
        except RuntimeError as error:
            found = UNEQUAL.search(str(error))
            if found is None:
                raise
            sequence = [int(token) for token in found["sequence"].split(",")]
            position = int(found["position"])
            try:
                operation = locate(loaded, sequence, position)
            except (ConfigError, RuntimeError, ValueError, OSError) as failure:
                operation = f"not found: {failure}"
            self._facts |= {
                "equal": False,
                "first_difference": {
                    "step": step,
                    "position": position,
                    "trainer": float(found["trainer"]),
                    "engine": float(found["engine"]),
                    "operation": operation,
                    "sequence": sequence,
                },
            }
            self._write()
            raise LogProbsDiffer(
                f"strict_on_policy: in step {step} the log-prob of token {position} of a sample is {found['trainer']} "
                f"in the trainer and {found['engine']} in the engine; they part in {operation}; {self._path} has the "
                "sequence"
            ) from error

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".writing")
        written.write_text(json.dumps(self._facts, indent=1) + "\n")
        # Atomic: a run that is killed while it writes leaves the last whole certificate.
        os.replace(written, self._path)
