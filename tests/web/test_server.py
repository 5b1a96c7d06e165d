"""The process that serves the page, asked over TCP as a browser or Prometheus does."""

import http.client
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.waits import becomes_ready
from tests.web.runs import end_server_of, server_of, status_of, write_run
from ttprun.errors import ConfigError
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import read_status, write_status
from ttprun.web import companion
from ttprun.web.companion import HEALTH_PORT_VARIABLE, answering_probes, serving

LIMIT_S = 100


class Client:
    """Asks one server."""

    def __init__(self, url: str) -> None:
        self.port = urlsplit(url).port or 0

    def get(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)) as connection:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            self.headers = answer.headers
            return answer.status, answer.read().decode()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return write_run(tmp_path / "run", replace(status_of(), updated_at=timestamp()))


@pytest.fixture
def client(run: RunDirectory) -> Iterator[Client]:
    with serving(":0", None, run) as url:
        yield Client(url)


def messages_of(client: Client, last: str = "") -> Iterator[tuple[str, str, Any]]:
    """(kind, id, data) of each server-sent event, as they come, until the server closes."""
    with closing(http.client.HTTPConnection("127.0.0.1", client.port, timeout=LIMIT_S)) as connection:
        connection.request("GET", "/api/events", headers={"Last-Event-ID": last})
        fields: dict[str, str] = {}
        for line in connection.getresponse():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            fields[name] = value
            if not name and "event" in fields:
                yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
            if not name:
                fields = {}


def append_event(run: RunDirectory, **fields: object) -> None:
    with open(run.events, "a") as log:
        log.write("\n" + json.dumps({"at": timestamp(), **fields}) + "\n")


def test_the_status_is_that_of_the_command_line(client: Client, run: RunDirectory) -> None:
    code, text = client.get("/api/status")

    assert code == 200
    assert json.loads(text) == json.loads(run.status.read_text())
    assert json.loads(text)["version"] == 1


def test_an_incident_comes_with_its_events(client: Client) -> None:
    code, text = client.get("/api/incidents/1")

    assert code == 200
    assert json.loads(text)["outcome"] == "recovered"
    assert [event["event"] for event in json.loads(text)["events"]] == ["incident", "compared", "incident"]
    assert client.get("/api/incidents/2")[0] == 404


def test_the_metrics_are_in_prometheus_format_and_say_what_the_files_say(client: Client) -> None:
    code, text = client.get("/metrics")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    assert code == 200
    assert client.headers["content-type"].startswith("text/plain")
    assert samples["ttprun_step",] == 50
    assert samples["ttprun_ranks", "running"] == 4
    assert samples["ttprun_nodes", "training"] == 1
    assert samples["ttprun_state", "healthy"] == 1
    assert samples["ttprun_incidents_total", "signal 9", "recovered", "replace"] == 1
    assert samples["ttprun_recovery_seconds_sum", "total"] == 2.0
    assert samples["ttprun_unproductive_seconds_total", "recovery"] == pytest.approx(2.0)
    assert samples["ttprun_steps_lost_total",] == 0


def test_open_metrics_are_given_to_who_asks_for_them(client: Client) -> None:
    _, text = client.get("/metrics", accept="application/openmetrics-text; version=1.0.0")

    assert client.headers["content-type"].startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_the_page_asks_for_nothing_but_its_own_data(client: Client) -> None:
    code, text = client.get("/")

    assert code == 200
    assert "connect-src 'self'" in client.headers["content-security-policy"]
    assert "default-src 'none'" in client.headers["content-security-policy"]
    text = text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert [word for word in ("src=", "http://", "https://", "@import", "url(") if word in text] == []


def test_a_page_gets_what_there_is_and_then_what_comes(client: Client, run: RunDirectory) -> None:
    messages = messages_of(client)

    kinds = [next(messages)[0] for _ in range(3)]
    events = [next(messages)[2] for _ in range(7)]
    append_event(run, event="note", text="new")
    new = next(data for kind, _, data in messages if kind == "event")

    assert kinds == ["status", "topology", "history"]
    assert [event["event"] for event in events][:2] == ["rank_started", "rank_exited"]  # not the earlier launch's
    assert new["text"] == "new"


def test_a_page_that_comes_again_gets_only_what_it_has_missed(client: Client, run: RunDirectory) -> None:
    last = next(number for kind, number, data in messages_of(client) if kind == "event" and data["event"] == "note")
    append_event(run, event="note", text="missed")

    missed = next(data for kind, _, data in messages_of(client, last) if kind == "event")

    assert missed["text"] == "missed"


def test_a_page_is_shown_the_end_of_the_run_before_its_server_is_gone(run: RunDirectory) -> None:
    with serving(":0", None, run) as url:
        messages = messages_of(Client(url))
        next(messages)
        write_status(run.status, status_of(state="done", exit_code=0))

    rest = list(messages)

    assert rest[-1][0] == "end"
    assert [data["status"]["state"] for kind, _, data in rest if kind == "status"][-1] == "done"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", Client(url).port), LIMIT_S)


@pytest.mark.parametrize(
    ("fields", "healthz", "readyz"),
    [
        ({"state": "healthy"}, 200, 200),
        ({"state": "starting"}, 200, 503),
        ({"state": "recovering"}, 200, 503),
        ({"state": "failed"}, 503, 503),
        ({"state": "done"}, 200, 503),
        ({"state": "stopped"}, 200, 503),
        ({"updated_at": "2020-01-01T00:00:00.000+00:00"}, 503, 503),
    ],
)
def test_a_job_in_recovery_is_healthy_but_not_ready(
    run: RunDirectory, fields: dict[str, Any], healthz: int, readyz: int
) -> None:
    write_status(run.status, replace(status_of(updated_at=timestamp()), **fields))

    with serving(":0", None, run) as url:
        client = Client(url)
        next(messages_of(client))
        answers = [client.get(path)[0] for path in ("/healthz", "/readyz")]

    assert answers == [healthz, readyz]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_done_by_http(client: Client, method: str) -> None:
    code, _ = client.get("/api/status", method)

    assert code == 405
    assert client.headers["allow"] == "GET, HEAD"


def test_a_request_with_a_body_is_refused_before_the_body_is_read(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port), LIMIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n")
        answer = connection.recv(4096)

    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_page_of_somebody_elses_cannot_read_this_one_by_a_name_of_its_own(client: Client) -> None:
    assert client.get("/api/status", host="evil.example")[0] == 403
    assert client.get("/api/status", host=f"localhost:{client.port}")[0] == 200


def test_with_a_named_host_the_token_is_needed_and_a_browser_gets_it_as_a_cookie(run: RunDirectory) -> None:
    with serving("127.0.0.1:0", None, run) as url:
        client = Client(url)
        token = run.http_token.read_text()

        without = client.get("/api/status")[0]
        wrong = client.get("/api/status", authorization="Bearer wrong")[0]
        right = client.get("/api/status", authorization=f"Bearer {token}")[0]
        first = client.get(f"/?token={token}")[0]
        place, cookie = client.headers["location"], client.headers["set-cookie"]
        page = client.get("/", cookie=cookie.partition(";")[0])[0]
        probe = client.get("/healthz")

    assert (without, wrong, right, first, place, page) == (401, 401, 200, 303, "/", 200)
    assert "HttpOnly" in cookie
    assert probe == (200, "ok\n")
    assert stat.S_IMODE(run.http_token.stat().st_mode) == 0o600


def test_on_a_terminal_the_address_that_is_printed_works_when_it_is_clicked(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, stderr = os.openpty()
    with closing(open(stderr, "w")) as shown, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", shown)
        with serving("127.0.0.1:0", None, run) as url:
            (address,) = re.findall(r"http://\S+", os.read(terminal, 10_000).decode())
            client = Client(url)
            clicked = client.get(address.removeprefix(url.rstrip("/")))[0]
            cookie = client.headers["set-cookie"].partition(";")[0]
            page = client.get(client.headers["location"], cookie=cookie)[0]
    os.close(terminal)

    assert address.startswith(f"{url}?token=")
    assert (clicked, page) == (303, 200)
    assert "token" not in url  # which the status of the job names


def test_a_log_that_others_may_read_names_the_tokens_file_and_not_the_token(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("127.0.0.1:0", None, run):
        said = capsys.readouterr().err

    assert str(run.http_token) in said
    assert run.http_token.read_text() not in said


def test_a_node_that_does_not_lead_redirects_to_the_one_that_leads_and_answers_probes_itself(
    run: RunDirectory,
) -> None:
    place = {"nodes": ("a", "b"), "node": 1, "is_leading": False, "pages": ("http://a:8080/", "http://b:8080/")}
    write_status(run.status, replace(read_status(run.status), leader=0, **place))
    with serving("127.0.0.1:0", None, run) as url:
        client = Client(url)
        token = run.http_token.read_text()
        unknown = client.get("/")[0]
        found = []
        for path in ("/", "/api/status", "/api/incidents/1"):
            code, _ = client.get(path, authorization=f"Bearer {token}")
            found.append((code, client.headers["location"]))
        own = [client.get(path, authorization=f"Bearer {token}")[0] for path in ("/healthz", "/metrics")]

    assert unknown == 401
    assert found == [(307, f"http://a:8080{path}?token={token}") for path in ("/", "/api/status", "/api/incidents/1")]
    assert own == [200, 200]


@pytest.mark.parametrize(
    ("fields", "place"),
    [({}, "http://a/"), ({"is_leading": True}, ""), ({"state": "done"}, ""), ({"pages": ()}, ""), ({"leader": 2}, "")],
    ids=["follows", "leads", "has ended", "nobody shows it", "the leader does not show it"],
)
def test_the_page_of_who_leads_is_named_by_those_that_follow(fields: dict[str, Any], place: str) -> None:
    status = status_of(is_leading=False, leader=0, pages=("http://a/", "http://b/"))

    assert replace(status, **fields).leaders_page == place


def test_a_token_file_that_others_can_read_is_refused_in_one_line(run: RunDirectory, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token that is long enough\n")
    token.chmod(0o640)

    with pytest.raises(ConfigError, match=r"is open to other users \(mode 0640\); chmod 600 it"):
        serving("127.0.0.1:0", str(token), run).__enter__()


def test_a_port_that_is_in_use_is_refused_in_one_line(run: RunDirectory, client: Client) -> None:
    with pytest.raises(ConfigError, match=r"--http: cannot listen on ':\d+' \(Address already in use\); name another"):
        serving(f":{client.port}", None, run).__enter__()


def test_without_the_extra_packages_one_line_says_what_to_install(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companion, "find_spec", lambda _: None)

    with pytest.raises(
        ConfigError, match=r"^--http needs packages that are not installed .*; pip install 'ttprun\[web\]'$"
    ):
        serving(":0", None, run).__enter__()


def test_the_port_of_torchelastic_answers_probes_and_nothing_else(run: RunDirectory) -> None:
    with answering_probes({HEALTH_PORT_VARIABLE: "0"}, run) as port:
        probes = Client(f"http://127.0.0.1:{port}/")
        alive, page, status = (probes.get(path, host="pod.example") for path in ("/healthz", "/", "/api/status"))

    assert alive == (200, "ok\n")
    assert page == status == (404, "only /healthz and /readyz are answered here\n")


@pytest.mark.parametrize(
    ("port", "why"), [("http", "is no address"), ("99999", "is no address"), ("taken", "Address already in use")]
)
def test_a_port_for_probes_that_cannot_be_had_is_reported_and_ends_nothing(
    run: RunDirectory, client: Client, caplog: pytest.LogCaptureFixture, port: str, why: str
) -> None:
    with answering_probes({HEALTH_PORT_VARIABLE: port.replace("taken", str(client.port))}, run) as had:
        assert had == 0

    (said,) = caplog.messages
    assert "no health check is answered" in said
    assert why in said


def test_a_server_that_is_killed_is_reported_and_nothing_else_happens(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(":0", None, run) as url:
        next(messages_of(Client(url)))
        thread = next(thread for thread in threading.enumerate() if thread.name == "ttprun-http")
        end_server_of(run)
        thread.join(LIMIT_S)

    assert caplog.messages == ["the page has ended (-9); the job continues"]


def test_the_server_dies_with_its_launcher_however_that_ends(run: RunDirectory) -> None:
    program = f"""
import sys
from ttprun.observe.run_directory import RunDirectory
from ttprun.web.companion import HEALTH_PORT_VARIABLE, answering_probes, serving
with serving(":0", None, RunDirectory({str(run.path)!r})) as url:
    print(url, flush=True)
    sys.stdin.read()
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with launcher:
        assert launcher.stdout is not None
        next(messages_of(Client(launcher.stdout.readline().strip())))
        server = os.pidfd_open(server_of(run))

        launcher.kill()

    assert becomes_ready(server)
    os.close(server)
