"""A Grafana dashboard of a pipeline's metrics, your own pipeline's included (by its dotted path).

python examples/monitoring/dashboard.py rlvr > dashboard.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

from roll.config.pipelines import PipelineDefinition, definition_of, find_own_modules, load_definition
from roll.tracking.services import series_name

_SOURCE = "${source}"
"""The dashboard's variable for the Prometheus server that it asks."""


def dashboard(pipeline: PipelineDefinition) -> dict[str, Any]:
    """A Grafana dashboard with the panels of a pipeline's own picture and the time of its phases, for any run."""
    panels = [(panel.title, [_expression(key) for key in panel.keys], panel.unit_range) for panel in pipeline.panels]
    panels += [
        ("Seconds of the step by phase", ['{__name__=~"roll_time_.*", run=~"$run"}'], False),
        ("Peak memory by phase and role", ['{__name__=~"roll_memory_.*", run=~"$run"}'], False),
        ("Tokens per second", ['roll_system_tps{run=~"$run"}'], False),
    ]
    source = {"type": "prometheus", "uid": _SOURCE}
    return {
        "title": f"roll: {pipeline.name}",
        "uid": f"roll-{pipeline.name}",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(roll_step, run)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                },
            ]
        },
        "panels": [
            {
                "id": index + 1,
                "title": title,
                "type": "timeseries",
                "datasource": source,
                "gridPos": {"x": 12 * (index % 2), "y": 8 * (index // 2), "w": 12, "h": 8},
                "fieldConfig": {"defaults": {"min": 0, "max": 1} if unit_range else {}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": "{{run}} {{__name__}}"}
                    for number, expression in enumerate(expressions)
                ],
            }
            for index, (title, expressions, unit_range) in enumerate(panels)
        ],
    }


def _expression(key: str) -> str:
    """The query of a panel's key, in which ``*`` stands for one part between slashes."""
    pattern = ".+".join(series_name(part).removeprefix("roll_") for part in key.split("*"))
    return f'{{__name__=~"roll_{pattern}", run=~"$run"}}' if "*" in key else f'{series_name(key)}{{run=~"$run"}}'


if __name__ == "__main__":
    (wanted,) = sys.argv[1:]
    find_own_modules()
    pipeline = load_definition(wanted) if "." in wanted else definition_of(wanted)
    sys.stdout.write(json.dumps(dashboard(pipeline), indent=1) + "\n")
