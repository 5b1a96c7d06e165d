"""The alerts and the dashboard: promtool accepts them, and every metric that they name is there."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from tests.web.runs import status_of, write_run
from ttprun.observe.run_view import RunView
from ttprun.observe.status import CheckpointStatus
from ttprun.web.metrics import RunCollector, StepTimes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALERTS = CONFIGS / "prometheus" / "alerts.yaml"
DASHBOARD = json.loads((CONFIGS / "grafana" / "ttprun.json").read_text())
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")


@pytest.fixture
def exposed(tmp_path: Path) -> str:
    checkpoint = CheckpointStatus(1, 40, "periodic", "2026-01-31T12:00:00.000+00:00", "/c", 1000, 0.5)
    view = RunView(write_run(tmp_path / "run", status_of(checkpoint=checkpoint, snapshot_step=30)))
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: view, StepTimes()))
    return generate_latest(registry).decode()


def expressions() -> list[str]:
    alerts = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return alerts + panels


@needs_promtool
def test_promtool_accepts_the_metrics(exposed: str) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=exposed, capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_promtool
def test_promtool_accepts_the_alerts_and_the_dashboards_expressions(tmp_path: Path) -> None:
    usable = [text.replace("$__rate_interval", "5m") for text in expressions()]
    rules = [{"record": f"r:{number}", "expr": text} for number, text in enumerate(usable)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))

    done = subprocess.run(
        ["promtool", "check", "rules", str(ALERTS), str(tmp_path / "rules.yaml")], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_that_an_alert_or_a_panel_names_is_exposed(exposed: str) -> None:
    named = {name for text in expressions() for name in re.findall(r"\bttprun_\w+", text)}

    there = {re.split(r"[{ ]", line)[0] for line in exposed.splitlines() if not line.startswith("#")}

    families = {line.split()[2] for line in exposed.splitlines() if line.startswith("# TYPE")}
    assert named - there - families == set()


def test_the_dashboard_has_only_what_grafanas_schema_knows() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="no grafana-foundation-sdk")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    plugins.register_default_plugins()

    known = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(DASHBOARD)))

    of_prometheus = ".annotations.list[0].titleFormat"  # the data source's own
    assert list(not_in(DASHBOARD, known)) == [of_prometheus]


def not_in(ours: Any, known: Any, place: str = "") -> Iterator[str]:
    """Places of values in a document that another one does not have."""
    if isinstance(ours, dict):
        for name, value in ours.items():
            yield from not_in(value, known.get(name) if isinstance(known, dict) else None, f"{place}.{name}")
    elif isinstance(ours, list) and isinstance(known, list) and len(ours) == len(known):
        for number, (value, other) in enumerate(zip(ours, known, strict=True)):
            yield from not_in(value, other, f"{place}[{number}]")
    elif ours != known:
        yield place
