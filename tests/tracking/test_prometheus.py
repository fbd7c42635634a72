"""The Prometheus tracker over real HTTP, and the dashboards of examples/monitoring."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from examples.monitoring.dashboard import dashboard
from roll.config.pipelines import NAMES, definition_of
from roll.tracking import TrackedRun, build_trackers
from roll.tracking.services import series_name

pytest.importorskip("prometheus_client")

MONITORING = Path(__file__).parents[2] / "examples/monitoring"


def scraped(address: Path) -> dict[str, float]:
    """Series and values as a Prometheus server reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(address.read_text().strip(), timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert all(sample.labels == {"run": "a run"} for family in families for sample in family.samples)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_newest_values_are_served(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path, "a run", {})
    tracker = build_trackers(["prometheus"], {"prometheus": {"port": 0}}, run)
    address = tmp_path / "prometheus/address"
    assert scraped(address) == {}
    tracker.log({"actor/kl_loss@max": 0.5, "val/pass@2": 0.75}, 3)
    tracker.log({"actor/kl_loss": 0.25}, 4)
    values = scraped(address)
    assert values.pop("roll_last_step_timestamp_seconds") > 1.7e9
    assert values == {"roll_actor_kl_loss": 0.25, "roll_val_pass_2": 0.75, "roll_step": 4.0}
    tracker.close()
    with pytest.raises(OSError, match="refused"):
        scraped(address)


def test_taken_port_and_address(tmp_path: Path) -> None:
    first = build_trackers("prometheus", {"port": 0}, TrackedRun(tmp_path / "1", "x", {}))
    port = int(re.search(r":(\d+)/", (tmp_path / "1/prometheus/address").read_text())[1])  # type: ignore[index]
    with pytest.raises(ValueError, match=f"127.0.0.1:{port} cannot be listened at .*port: 0 takes a free one"):
        build_trackers("prometheus", {"port": port}, TrackedRun(tmp_path / "2", "x", {}))
    first.close()


@pytest.mark.parametrize("name", ["rlvr", "agentic"])
def test_dashboards_are_up_to_date(name: str) -> None:
    """Write it again with ``python examples/monitoring/dashboard.py NAME > examples/monitoring/grafana-NAME.json``."""
    written = json.loads((MONITORING / f"grafana-{name}.json").read_text(encoding="utf-8"))
    assert written == dashboard(definition_of(name))


def test_every_panel_of_every_pipeline_has_a_query() -> None:
    for name in NAMES:
        panels = {panel["title"]: panel for panel in dashboard(definition_of(name))["panels"]}
        for panel in definition_of(name).panels:
            expressions = [target["expr"] for target in panels[panel.title]["targets"]]
            assert len(expressions) == len(panel.keys)
            for key, expression in zip(panel.keys, expressions, strict=True):
                pattern = re.match(r'(?:\{__name__=~")?(\w[\w.+*]*)', expression)
                assert pattern is not None
                assert re.fullmatch(pattern[1], series_name(key.replace("*", "some_part"))), key
