"""Spans of an incident, as a collector receives them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.web.runs import REPLACED, STARTED_S, incident_event, status_of, write_run
from tests.web.test_notifier import log
from ttprun.observe.run_directory import RunDirectory
from ttprun.web import otel
from ttprun.web.notifier import notifying

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="no otel")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no otel")
PHASES_S = {name: value for name, value in vars(REPLACED).items() if name.endswith("_s") and not isinstance(value, str)}


class Collector(HTTPServer):
    """Takes what is exported by OTLP/HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.received: list[tuple[str, Any]] = []


class _Request(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request = trace_service.ExportTraceServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
        self.server.received.append((self.path, request))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = write_run(tmp_path / "run", status_of())
    run.events.write_text("")
    return run


def test_an_incident_that_has_ended_is_one_trace_with_a_span_for_each_phase(
    run: RunDirectory, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("no_proxy", "*")
    ended = (
        incident_event(42, "recovered", 40) | PHASES_S | {"rung": "replace", "ranks": [1], "reason": "it was killed"}
    )

    with notifying(otel.command_for({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://any"}), otel.KINDS, run):
        log(run, incident_event(40, "open", 40), ended, {"event": "run_ended", "exit_code": 0})

    ((path, request),) = collector.received
    (of_resource,) = request.resource_spans
    spans = {span.name: span for span in of_resource.scope_spans[0].spans}
    whole = spans.pop("incident: signal 9")
    resource = {one.key: one.value.string_value for one in of_resource.resource.attributes}
    attributes = {one.key: one.value for one in whole.attributes}
    assert path == "/v1/traces"
    assert (resource["service.name"], resource["ttprun.run_id"]) == ("ttprun", "r1")
    assert list(spans) == ["detect", "freeze", "spawn", "replay", "transfer", "rebuild", "reissue"]
    assert {span.parent_span_id for span in spans.values()} == {whole.span_id}
    assert {span.trace_id for span in spans.values()} == {whole.trace_id}
    assert attributes["ttprun.incident.rung"].string_value == "replace"
    assert attributes["ttprun.incident.ranks"].array_value.values[0].int_value == 1
    began_s, ended_s = (at_ns / 1e9 for at_ns in (whole.start_time_unix_nano, whole.end_time_unix_nano))
    assert (began_s, ended_s) == (pytest.approx(STARTED_S + 40, abs=0.01), pytest.approx(STARTED_S + 42, abs=0.01))
    frozen = spans["freeze"]
    assert (frozen.end_time_unix_nano - frozen.start_time_unix_nano) / 1e9 == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("environment", "is_wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_spans_are_sent_if_opentelemetrys_variables_ask_for_them(environment: dict[str, str], is_wanted: bool) -> None:
    assert (otel.command_for(environment) is not None) == is_wanted


def test_a_collector_that_is_not_there_is_reported_once_and_the_job_goes_on(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with HTTPServer(("127.0.0.1", 0), _Request) as server:
        port = server.server_port
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")

    with notifying(otel.command_for({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://any"}), otel.KINDS, run):
        log(run, incident_event(42, "recovered", 40), {"event": "run_ended", "exit_code": 0})

    assert capfd.readouterr().err.count("has failed (") == 1
