"""The control socket: who may ask what."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun import recovery
from ttprun.agent.base.peers import Peers
from ttprun.agent.launcher import control_socket
from ttprun.agent.launcher.control_socket import ControlSocket, Requests
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.codec import decode
from ttprun.protocol.control_requests import Accepted, Rejected, SaveNow

LIMIT_S = 60.0
Ask = Callable[[bytes], Any]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    found = RunDirectory.create("run", tmp_path / ("long" * 20) / ("name" * 20))
    yield found
    found.release()


@pytest.fixture
def asked(run: RunDirectory) -> list[Any]:
    return []


class Agent:
    """A control socket and the selector on which it runs, served by hand."""

    def __init__(self, run: RunDirectory, asked: list[Any]) -> None:
        self.selector = selectors.DefaultSelector()
        self.asked = asked
        self.socket = ControlSocket(run, self._answer, self.selector)

    def _answer(self, request: Any) -> Any:
        self.asked.append(request)
        if request.fault == "wrong":
            raise ValueError("that is no fault")
        return Accepted("done")

    def serve(self) -> None:
        """Answer all that is ready."""
        while ready := self.selector.select(0.0):
            for key, _ in ready:
                key.data()
        self.socket.pass_time()


@pytest.fixture
def agent(run: RunDirectory, asked: list[Any]) -> Iterator[Agent]:
    """Carries out every fault but the one that is called wrong."""
    found = Agent(run, asked)
    yield found
    found.socket.close()
    found.selector.close()


def connect(run: RunDirectory) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(LIMIT_S)
    with run.control_address() as address:
        client.connect(address)
    return client


@pytest.fixture
def ask(run: RunDirectory, agent: Agent) -> Ask:
    """`ask(line)`: what the agent answers, None if it hangs up."""

    def ask_once(line: bytes) -> Any:
        with connect(run) as client:
            client.setblocking(False)
            with contextlib.suppress(OSError):  # it may not take all of it
                client.send(line)
                client.shutdown(socket.SHUT_WR)
            agent.serve()
            client.settimeout(LIMIT_S)
            reply = b""
            with contextlib.suppress(OSError):
                reply = client.recv(1 << 16)
        return decode(reply, {"Accepted": Accepted, "Rejected": Rejected}) if reply else None

    return ask_once


def line_of(run: RunDirectory, **request: Any) -> bytes:
    return (
        json.dumps({"op": "InjectFault", "token": run.read_token(), "fault": "kill:rank=0"} | request).encode() + b"\n"
    )


@pytest.mark.parametrize("token", ["", "wrong", None, 5, "é"])
def test_a_request_without_the_right_token_does_nothing(
    run: RunDirectory, ask: Ask, asked: list[Any], token: Any
) -> None:
    reply = ask(line_of(run, token=token))

    assert reply is None or isinstance(reply, Rejected)
    assert asked == []


def test_a_request_that_nobody_knows_is_refused(run: RunDirectory, ask: Ask, asked: list[Any]) -> None:
    assert isinstance(ask(line_of(run, op="exec")), Rejected)
    assert ask(line_of(run, fault=3)) == Rejected("InjectFault: Expected `str`, got `int` - at `$.fault`")
    assert asked == []


def test_a_wrong_request_is_answered_with_the_reason(run: RunDirectory, ask: Ask) -> None:
    assert ask(line_of(run, fault="wrong")) == Rejected("that is no fault")


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"no json\n", b"[]\n", b"5\n", b"null\n", b"\xff\xfe\n", b"x" * (1 << 17)]
)
def test_nonsense_does_not_end_the_agent(run: RunDirectory, ask: Ask, line: bytes) -> None:
    ask(line)

    assert ask(line_of(run)) == Accepted("done")


def test_clients_that_say_nothing_or_half_a_word_delay_nobody(run: RunDirectory, agent: Agent, ask: Ask) -> None:
    silent = [connect(run) for _ in range(8)]
    for client in silent[4:]:
        client.sendall(b'{"op": ')

    agent.serve()
    waits_s = [key.fileobj.gettimeout() for key in agent.selector.get_map().values()]  # type: ignore[union-attr]

    assert waits_s == [0.0] * 9  # the listener's, and one for each client
    assert ask(line_of(run)) == Accepted("done")
    for client in silent:
        client.close()


def test_who_has_had_its_time_is_hung_up_on(run: RunDirectory, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "CLIENT_LIMIT_S", 0.0)
    with connect(run) as client:
        agent.serve()

        assert client.recv(1) == b""


def test_of_too_many_clients_the_oldest_is_hung_up_on(run: RunDirectory, agent: Agent, ask: Ask) -> None:
    clients = [connect(run) for _ in range(control_socket.MOST_CLIENTS + 1)]

    agent.serve()

    assert clients[0].recv(1) == b""
    assert ask(line_of(run)) == Accepted("done")
    for client in clients:
        client.close()


def test_who_does_not_take_its_answer_delays_nobody(run: RunDirectory, agent: Agent, ask: Ask) -> None:
    with connect(run) as client:
        client.sendall(line_of(run, op="x" * 60_000))

        agent.serve()  # it returns: no wait is entered

    assert ask(line_of(run)) == Accepted("done")


def test_the_run_directory_and_what_is_in_it_are_the_owners_alone(run: RunDirectory, agent: Agent) -> None:
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (run.path, run.control_socket, run.control_token)]

    assert modes == [0o700, 0o600, 0o600]


def test_a_socket_that_is_closed_leaves_nothing(run: RunDirectory) -> None:
    with selectors.DefaultSelector() as selector:
        ControlSocket(run, lambda request: {}, selector).close()

    assert not run.control_socket.exists()


def requests_of(job: recovery.Job, **differing: Any) -> Requests:
    config = SimpleNamespace(mindio=False)
    known = {"job": job, "verdict": None, "is_broken": False, "config": config, "peers": Peers()}
    node: Any = SimpleNamespace(**known | differing)
    nobody: Any = None
    return Requests(node, nobody, nobody, nobody)


def test_who_asks_too_early_hears_who_is_not_ready() -> None:
    job = recovery.new_job(recovery.Settings(world_size=2))

    reported = requests_of(job).answer(SaveNow())

    assert reported == Rejected("the hooks of ranks 0, 1 have not reported yet")


def test_who_asks_when_nobody_decides_any_more_hears_so() -> None:
    job = recovery.new_job(recovery.Settings(world_size=1))

    reported = requests_of(job, is_broken=True).answer(SaveNow())

    assert reported == Rejected("ttprun's supervisor has failed: the job runs as under torchrun")


def test_a_rank_that_holds_the_others_up_is_moved_once_and_a_refusal_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = requests_of(recovery.new_job(recovery.Settings(world_size=2)))
    requests.standbys = SimpleNamespace(is_on_its_way=False)  # type: ignore[assignment]
    replies = iter([Rejected("the job is REPLAYING; ask again")] * 2 + [Accepted(ranks=(1,))])
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(requests, "_move", lambda *words, device: asked.append((*words, device)) or next(replies))

    for _ in range(5):
        requests.move_straggler(1)

    assert asked == [((1,), "it held the others up", "*")] * 3
    assert caplog.messages == ["rank 1 holds the others up, and is not moved: the job is REPLAYING; ask again"]
