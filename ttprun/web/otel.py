"""Incidents as spans of OpenTelemetry: one trace for each that has ended, with a span for each of its phases.

Run by the notifier for each incident, as any command of `--on-event` is: `python -m ttprun.web.otel` reads the event
from standard input, and sends it to OTEL_EXPORTER_OTLP_ENDPOINT by OTLP/HTTP. The variables of OpenTelemetry's SDK hold
here, too. Begin with `export`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from ttprun import __version__
from ttprun.observe.events import Kind, spans_of, unix_s
from ttprun.observe.status import IncidentStatus

KINDS: tuple[Kind, ...] = ("incident_ended",)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_SEND_LIMIT_S = 8  # the notifier waits no longer than 10 s
_SHOWN = (
    "id",
    "kind",
    "rung",
    "outcome",
    "reason",
    "reason_kind",
    "boundary",
    "steps_lost",
    "ranks",
    "equal",
    "not_proved",
)


def command_for(environment: Mapping[str, str]) -> str | None:
    """What the notifier has to run; None if nobody asks for spans, or the extra `ttprun[otel]` is not installed."""
    is_asked = any(environment.get(name) for name in _ENDPOINTS)
    is_off = environment.get("OTEL_TRACES_EXPORTER") == "none" or environment.get("OTEL_SDK_DISABLED") == "true"
    is_there = False
    with suppress(ModuleNotFoundError):  # of one of its parents
        is_there = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    return f"{shlex.quote(sys.executable)} -m ttprun.web.otel" if is_asked and is_there and not is_off else None


def export(message: Mapping[str, Any]) -> bool:
    """Send the spans of an incident that has ended; returns whether they have arrived.

    message   as `--on-event` gives it

    Blocks _SEND_LIMIT_S at most.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    if "service.name" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        os.environ.setdefault("OTEL_SERVICE_NAME", "ttprun")
    event = message["event"]
    incident = IncidentStatus(
        **{field.name: event[field.name] for field in fields(IncidentStatus) if field.name in event}
    )
    lost_s = unix_s(event["at"]) - max(0.0, event["at_s"] - event["opened_at_s"])
    spans = spans_of(incident)
    provider = TracerProvider(resource=Resource.create({"ttprun.run_id": message.get("run_id", "")}))
    made = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(made))
    tracer = provider.get_tracer("ttprun", __version__)
    attributes = {f"ttprun.incident.{name}": event[name] for name in _SHOWN if event.get(name) not in (None, [], ())}
    first_s = min((start_s for _, start_s, _ in spans), default=0.0)
    whole = tracer.start_span(f"incident: {incident.kind}", start_time=_ns(lost_s + first_s), attributes=attributes)
    if incident.outcome != "recovered":
        whole.set_status(Status(StatusCode.ERROR, incident.reason))
    for phase, start_s, end_s in spans:
        part = tracer.start_span(phase, set_span_in_context(whole), start_time=_ns(lost_s + start_s))
        part.end(_ns(lost_s + end_s))
    whole.end(_ns(unix_s(event["at"])))
    sent = OTLPSpanExporter(timeout=_SEND_LIMIT_S).export(made.get_finished_spans())
    return bool(sent is SpanExportResult.SUCCESS)


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)


def main() -> int:
    """Export the event on standard input."""
    return 0 if export(json.load(sys.stdin)) else 1


if __name__ == "__main__":
    sys.exit(main())
