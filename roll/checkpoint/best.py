"""Which checkpoint of a run is the best by a metric."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path

from roll.config.run import CheckpointConfig

logger = logging.getLogger(__name__)

BEST_LINK, _BEST_RECORD = "best", "best.json"


class BestCheckpoint:
    """The best checkpoint by a metric: it is never pruned, and the link ``best`` leads to it.

    Values by step are kept in ``best.json`` next to the checkpoints, so that a resumed run knows them. The value logged
    at step n was measured with the weights after n steps: those of ``checkpoint-n``.

    Args:
        root: the folder of the checkpoints.
        config: names the metric.
    """

    def __init__(self, root: Path, config: CheckpointConfig) -> None:
        self.metric, self.mode = str(config.keep_best_metric), config.keep_best_mode
        self._record = root / _BEST_RECORD
        self._values: dict[int, float] = self._read()
        self._seen: set[str] = set()
        self._linked: str | None = None

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics logged at ``step``."""
        value = metrics.get(self.metric)
        if value is None:
            # Only for the warning at the end, which a metric that was logged once makes needless.
            if not self._values:
                self._seen.update(metrics)
        elif math.isfinite(value):
            self._values[step] = value
            self._write()

    def best_of(self, steps: Collection[int]) -> int | None:
        """The step with the best value, the earliest of equal ones; None where none of them has been measured."""
        measured = [step for step in sorted(steps) if step in self._values]
        sign = 1.0 if self.mode == "max" else -1.0
        return max(measured, key=lambda step: (sign * self._values[step], -step), default=None)

    def link(self, root: Path, name: str) -> None:
        """Let ``root/best`` lead to the checkpoint ``name``."""
        link, new = root / BEST_LINK, root / f".{BEST_LINK}.new"
        if self._linked == name and link.is_symlink():
            return
        # Made beside it and renamed over it: a reader finds the old link or the new one, never none.
        new.unlink(missing_ok=True)
        new.symlink_to(name)
        new.replace(link)
        self._linked = name
        step = int(name.rpartition("-")[2])
        logger.info("best checkpoint so far: %s (%s %g)", root / name, self.metric, self._values[step])

    def forget_after(self, step: int) -> None:
        """Drop the values of later steps, which belong to a branch that the run has left."""
        self._values = {at: value for at, value in self._values.items() if at <= step}
        self._write()

    def check_measured(self) -> None:
        """Warn if the metric was never logged."""
        if not self._values and self._seen:
            logger.warning(
                "checkpoint_config.keep_best_metric: %s was never logged; logged were %s",
                self.metric,
                ", ".join(sorted(self._seen)),
            )

    def _read(self) -> dict[int, float]:
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            is_same = (record["metric"], record["mode"]) == (self.metric, self.mode)
            return {int(step): float(value) for step, value in record["values"].items()} if is_same else {}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is not readable (%r): the best checkpoint is looked for anew", self._record, error)
            return {}

    def _write(self) -> None:
        self._record.parent.mkdir(parents=True, exist_ok=True)
        record = {"metric": self.metric, "mode": self.mode, "values": self._values}
        new = self._record.with_name(f".{_BEST_RECORD}.new")
        new.write_text(json.dumps(record) + "\n", encoding="utf-8")
        new.replace(self._record)
