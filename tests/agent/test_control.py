"""The control socket: who may ask what."""

from __future__ import annotations

import contextlib
import json
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ttprun.agent import control
from ttprun.agent.control import ControlSocket
from ttprun.observe.run_directory import RunDirectory

Ask = Callable[[bytes], Any]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    found = RunDirectory.create("run", tmp_path / ("long" * 20) / ("name" * 20))
    yield found
    found.release()


@pytest.fixture
def asked(run: RunDirectory) -> list[Any]:
    return []


@pytest.fixture
def listener(run: RunDirectory, asked: list[Any]) -> Iterator[ControlSocket]:
    """An agent's control socket that carries out every fault but the one that is called wrong."""

    def answer(request: Any) -> Any:
        asked.append(request)
        if request["fault"] == "wrong":
            raise ValueError("that is no fault")
        return {"ok": True, "message": "done"}

    found = ControlSocket(run, answer)
    yield found
    found.close()


@pytest.fixture
def ask(run: RunDirectory, listener: ControlSocket) -> Ask:
    """`ask(line)`: what the agent answers, None if it hangs up."""

    def ask_once(line: bytes) -> Any:
        with socket.socket(socket.AF_UNIX) as client, run.control_address() as address:
            client.connect(address)
            thread = threading.Thread(target=listener.accept)
            thread.start()
            reply = b""
            with contextlib.suppress(OSError):  # it may hang up before all is said
                client.sendall(line)
                client.shutdown(socket.SHUT_WR)
                reply = client.recv(1 << 16)
            thread.join()
        return json.loads(reply) if reply else None

    return ask_once


def line_of(run: RunDirectory, **request: Any) -> bytes:
    return (
        json.dumps({"op": "inject_fault", "token": run.read_token(), "fault": "kill:rank=0"} | request).encode() + b"\n"
    )


def test_a_request_with_the_token_is_answered(run: RunDirectory, ask: Ask, asked: list[Any]) -> None:
    assert ask(line_of(run)) == {"ok": True, "message": "done"}
    assert [request["fault"] for request in asked] == ["kill:rank=0"]


@pytest.mark.parametrize("token", ["", "wrong", None, 5, "é"])
def test_a_request_without_the_right_token_does_nothing(
    run: RunDirectory, ask: Ask, asked: list[Any], token: Any
) -> None:
    reply = ask(line_of(run, token=token))

    assert reply is None or reply["ok"] is False
    assert asked == []


def test_a_request_that_nobody_knows_is_refused(run: RunDirectory, ask: Ask, asked: list[Any]) -> None:
    assert ask(line_of(run, op="exec"))["ok"] is False
    assert asked == []


def test_a_wrong_request_is_answered_with_the_reason(run: RunDirectory, ask: Ask) -> None:
    assert ask(line_of(run, fault="wrong")) == {"ok": False, "error": "that is no fault"}


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"no json\n", b"[]\n", b"5\n", b"null\n", b"\xff\xfe\n", b"x" * (1 << 17)]
)
def test_nonsense_does_not_end_the_agent(run: RunDirectory, ask: Ask, line: bytes) -> None:
    ask(line)

    assert ask(line_of(run))["ok"] is True


def test_a_client_that_says_nothing_is_not_waited_for(
    run: RunDirectory, listener: ControlSocket, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_REQUEST_LIMIT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent, run.control_address() as address:
        silent.connect(address)
        listener.accept()

    assert ask(line_of(run)) == {"ok": True, "message": "done"}


def test_the_run_directory_and_what_is_in_it_are_the_owners_alone(run: RunDirectory, listener: ControlSocket) -> None:
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (run.path, run.control_socket, run.control_token)]

    assert modes == [0o700, 0o600, 0o600]


def test_a_socket_that_is_closed_leaves_nothing(run: RunDirectory) -> None:
    listener = ControlSocket(run, lambda request: {})

    listener.close()

    assert not run.control_socket.exists()
