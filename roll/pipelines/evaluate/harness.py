"""Tasks of lm-eval and Inspect on models of ours (:mod:`roll.serving.harness`).

Engines are started once; between two models of one architecture weights are exchanged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.config.loader import LoadedConfig
from roll.config.plan.plan import RolePlan
from roll.pipelines.evaluate.config import EvaluateConfig, EvaluatedModel, EvaluatePlan, Pass
from roll.pipelines.evaluate.models import Engines, ModelRun
from roll.pipelines.evaluate.results import missed
from roll.pipelines.evaluate.samples import RESULTS
from roll.pipelines.files import load_tokenizer
from roll.rollout.engines import EngineClient
from roll.serving.harness import HarnessConfig, run_program
from roll.serving.server import FrontOptions, HttpFront

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class HarnessRun(ModelRun[EvaluateConfig, EvaluatePlan]):
    """Every model works on the tasks of a harness."""

    def __init__(self, loaded: LoadedConfig[EvaluateConfig], options: HarnessConfig) -> None:
        assert isinstance(loaded.plan, EvaluatePlan)
        super().__init__(loaded, loaded.plan, loaded.config.evaluate)
        self._options = options
        self.metrics: dict[str, dict[str, float]] = {}

    # The harness reads its own data, asks over HTTP and writes its own files.

    def settings(self) -> dict[str, Any]:
        return {}

    def read(self, tokenizer: PreTrainedTokenizerBase, role: RolePlan) -> None: ...

    def num_asked(self, way: Pass) -> int:
        return 0

    async def answer(self, model: EvaluatedModel, way: Pass, numbers: Sequence[int], client: EngineClient) -> None: ...

    def open(self) -> None: ...

    def evaluate_group(self, models: Sequence[EvaluatedModel]) -> None:
        base = self.role_of(models[0])
        engines: Engines | None = None
        front = HttpFront(FrontOptions(self._options.name, max_running_requests=self.config.max_running_requests))
        self.context.at_end(front.close)
        is_open = False
        for model in models:
            with self.context.interruptible():
                engines = self.load(model, base, engines, is_last=False)
                if not is_open:
                    tokenizer = load_tokenizer(base.model_path, base.section.model_args.trust_remote_code)
                    front.open(engines.cluster, tokenizer)
                    is_open = True
                output = self.plan.output_dir / self._options.name / model.name
                logger.info("%s", model.description)
                self.metrics[model.name] = run_program(self._options, front, model.base, output)
            self.context.record_validation(
                {f"{self._options.name}/{name}": value for name, value in self.metrics[model.name].items()},
                self.plan.models.index(model),
            )
        front.close()
        if engines is not None:
            engines.close(self.residency)

    def finish(self) -> list[str]:
        """Write ``results.json`` and print the table; a sentence for every threshold that was missed."""
        failed = list(missed(self.keys.thresholds, self.metrics))
        file = self.plan.output_dir / self._options.name / RESULTS
        content = {"harness": self._options.name, "metrics": self.metrics, "below_threshold": failed}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("metric", *self.metrics):
            table.add_column(heading, no_wrap=True)
        for name in dict.fromkeys(name for found in self.metrics.values() for name in found):
            if not name.endswith("_stderr"):
                cells = [f"{found[name]:.4f}" if name in found else "" for found in self.metrics.values()]
                table.add_row(*map(Text, (name, *cells)))
        console = Console(emoji=False)
        console.print(table)
        console.print(Text(f"results   {file}"), soft_wrap=True)
        for sentence in failed:
            console.print(Text(f"below its threshold: {sentence}", style="red"), soft_wrap=True)
        return failed
