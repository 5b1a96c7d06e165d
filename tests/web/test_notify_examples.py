"""The examples for `--on-event`: each is run with an event, and with a stand-in for the program or server it calls."""

import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "configs" / "notify"
REPORTED = {
    "kind": "incident_ended",
    "run_id": "r1",
    "state": "healthy",
    "step": 41,
    "event": {"event": "incident", "outcome": "recovered", "reason": "rank 1 was killed: it's back"},
}


def run_example(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(EXAMPLES / name), *words],
        input=json.dumps(REPORTED),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("example", "program", "words", "environment", "called"),
    [
        (
            "slack.sh",
            "curl",
            (),
            {"SLACK_WEBHOOK_URL": "https://hooks.example/1"},
            [
                "--silent --show-error --fail --max-time 8 -H content-type: application/json --data @- "
                "https://hooks.example/1",
                '{"text": "ttprun r1: incident_ended at step 41: rank 1 was killed: it\'s back"}',
            ],
        ),
        (
            "mail.sh",
            "mail",
            ("me@example.org",),
            {},
            ["-s ttprun r1: incident_ended me@example.org", json.dumps(REPORTED)],
        ),
        (
            "slurm.sh",
            "scontrol",
            (),
            {"SLURM_JOB_ID": "77"},
            ["update JobId=77 Comment=ttprun: incident_ended at step 41: rank 1 was killed: it's back"],
        ),
    ],
)
def test_an_example_calls_its_program_with_what_has_happened(
    tmp_path: Path, example: str, program: str, words: tuple[str, ...], environment: dict[str, str], called: list[str]
) -> None:
    stand_in = tmp_path / program
    stand_in.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/called\ncat >> {tmp_path}/called\n')
    stand_in.chmod(0o700)

    done = run_example(example, *words, **environment, PATH=f"{tmp_path}:{os.environ['PATH']}")

    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "called").read_text().strip().splitlines()[: len(called)] == called


class Trainer(BaseHTTPRequestHandler):
    """Takes one message of a TrainJob."""

    received: tuple[str, str, Any] | None = None

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        type(self).received = (self.path, self.headers["authorization"], json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl, which makes the server's certificate")
def test_the_example_for_kubeflow_sends_step_and_state_with_its_token(tmp_path: Path) -> None:
    certificate, key, token = tmp_path / "ca.crt", tmp_path / "key", tmp_path / "token"
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost "
        f"-keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    token.write_text("a token\n")
    with HTTPServer(("127.0.0.1", 0), Trainer) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()

        done = run_example(
            "kubeflow.py",
            KUBEFLOW_TRAINER_SERVER_URL=f"https://localhost:{server.server_port}/trainjobs/t/status",
            KUBEFLOW_TRAINER_SERVER_CA_CERT=str(certificate),
            KUBEFLOW_TRAINER_SERVER_TOKEN=str(token),
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            no_proxy="*",
        )
        thread.join(60)

    assert (done.returncode, done.stderr) == (0, "")
    assert Trainer.received is not None
    path, authorization, body = Trainer.received
    assert (path, authorization) == ("/trainjobs/t/status", "Bearer a token")
    assert {metric["name"]: metric["value"] for metric in body["trainerStatus"]["metrics"]} == {
        "state": "healthy",
        "step": "41",
        "event": "incident_ended",
    }
