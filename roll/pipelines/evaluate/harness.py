"""Tasks of lm-eval and Inspect on models of ours (:mod:`roll.serving.harness`).

Engines are started once; between two models of one architecture weights are exchanged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from roll.config.loader import LoadedConfig
from roll.distributed.signals import ending
from roll.pipelines.evaluate.config import EvaluateConfig, EvaluatedModel, EvaluatePlan
from roll.pipelines.evaluate.models import EngineRun, Engines
from roll.pipelines.evaluate.results import missed, plain_table, show_results
from roll.pipelines.evaluate.samples import RESULTS
from roll.pipelines.files import load_tokenizer
from roll.serving.harness import HarnessConfig, run_program
from roll.serving.server import FrontOptions, HttpFront

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


class HarnessRun(EngineRun[EvaluateConfig, EvaluatePlan]):
    """Every model works on the tasks of a harness."""

    def __init__(self, loaded: LoadedConfig[EvaluateConfig], options: HarnessConfig) -> None:
        super().__init__(loaded)
        self._options = options
        self.metrics: dict[str, dict[str, float]] = {}

    def evaluate_group(self, models: Sequence[EvaluatedModel]) -> None:
        base = self.role_of(models[0])
        engines: Engines | None = None
        front = HttpFront(FrontOptions(self._options.name, max_running_requests=self.config.max_running_requests))
        self.context.at_end(front.close)
        for model in models:
            with ending.interruptible():
                is_new = engines is None
                engines = self.load(model, base, engines, is_last=False)
                if is_new:
                    tokenizer = load_tokenizer(base.model_path, base.section.model_args.trust_remote_code)
                    front.open(engines.cluster, tokenizer)
                output = self.plan.output_dir / self._options.name / model.name
                logger.info("%s (%s)", model.name, model.path)
                self.metrics[model.name] = run_program(self._options, front, model.base, output)
            named = {f"{self._options.name}/{name}": value for name, value in self.metrics[model.name].items()}
            self.context.record_validation(named, self.plan.models.index(model))
        front.close()
        if engines is not None:
            engines.close(self.residency)

    def finish(self) -> list[str]:
        """Write ``results.json`` and print the table; a sentence for every threshold that was missed."""
        failed = list(missed(self.keys.thresholds, self.metrics))
        file = self.plan.output_dir / self._options.name / RESULTS
        content = {"harness": self._options.name, "metrics": self.metrics, "below_threshold": failed}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        table = plain_table("metric", *self.metrics)
        for name in dict.fromkeys(name for found in self.metrics.values() for name in found):
            if not name.endswith("_stderr"):
                cells = [f"{found[name]:.4f}" if name in found else "" for found in self.metrics.values()]
                table.add_row(*map(Text, (name, *cells)))
        show_results([table], {"results": file}, failed)
        return failed
