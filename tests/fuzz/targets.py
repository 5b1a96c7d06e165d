"""What reads what another process can write: each target is fed with damaged data, and must answer as it says.

No exception but those that its caller handles, no endless loop, no acceptance of what was never sent; and what is
refused has one line of reason. Begin with `TARGETS`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.agent.nodes import node_of, part
from tests.capture.records import record_of
from tests.state.making import DESCRIPTION, locked
from ttprun import recovery
from ttprun.agent.base.spare_pool import Listener
from ttprun.agent.base.stored_states import open_checkpoint
from ttprun.agent.between.agent import Follower
from ttprun.agent.between.rendezvous import KNOWN as OF_NODES
from ttprun.agent.launcher.control_socket import ControlSocket, _Client
from ttprun.agent.lead.coordinator import Leader
from ttprun.capture.records.packing import MalformedRecordError
from ttprun.capture.records.recorder import HEADER_BYTES, Recorder, records_up_to
from ttprun.capture.values import pack
from ttprun.chaos.injected_faults import parse_fault
from ttprun.cli.run_reports import status as show_status
from ttprun.errors import ConfigError
from ttprun.observe.events import read_events, read_history
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import parse_status, read_topology
from ttprun.protocol import channel, meeting, node_messages
from ttprun.protocol.channel import Channel
from ttprun.protocol.codec import Refused, decode, encode
from ttprun.protocol.control_requests import Accepted
from ttprun.recovery.elastic_policy import parse_hosts
from ttprun.state.checkpoint import MANIFEST_NAME, Checkpoint, inspect, verify
from ttprun.state.files import InvalidCheckpointError

FOLDER = Path(__file__).resolve().parent
LONGEST_REASON = 600  # characters

Feed = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """One reader.

    seeds   what it reads if nothing is damaged
    open    makes a function that feeds it; what it registers is closed at the end
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    open: Callable[[ExitStack], Feed]


def is_reason(text: str) -> bool:
    """Whether an operator can read it in one line."""
    return 0 < len(text) <= LONGEST_REASON and "\n" not in text


def check(reason: object) -> None:
    """What is refused says why."""
    assert is_reason(str(reason)), reason


def traffic(known: dict[str, type]) -> list[bytes]:
    """Recorded lines of these classes (a job on one node, and one on three; a rank and a node were killed)."""
    lines = (FOLDER / "traffic.jsonl").read_bytes().splitlines()
    found = [line for line in lines if json.loads(line)["op"] in known]
    assert found
    return found


def feed_codec(known: dict[str, type]) -> Callable[[ExitStack], Feed]:
    """Lines of one class of messages: refused in one line, or the same again when it is sent on."""

    def feed(line: bytes) -> None:
        message = decode(line, known)
        if isinstance(message, Refused):
            assert is_reason(message.reason), message
            return
        again = decode(encode(message), known)
        assert again == message or repr(again) == repr(message)  # NaN

    return lambda stack: feed


def open_channel(stack: ExitStack) -> Feed:
    """A stream of bytes that comes in pieces: all complete lines are read, whatever is in them."""

    def feed(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            end, found = Channel(ours), list[Any]()
            for at in range(0, len(data) + 1, 40_000):
                theirs.sendall((data + b"\n")[at : at + 40_000])
                found += end.read_available()
        assert len(found) == data.count(b"\n") + 1
        assert all(is_reason(one.reason) for one in found if isinstance(one, Refused))

    return feed


class Nobody(selectors.SelectSelector):
    """A selector in which nothing is registered."""

    def register(self, *_: Any, **__: Any) -> Any: ...

    def unregister(self, *_: Any) -> Any: ...


def open_control(stack: ExitStack) -> Feed:
    """The control socket: whoever has not the token gets nothing done, and a bad line gets one line."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ttprun-fuzz-"))
    run = RunDirectory.create("fuzz", Path(folder) / "run")
    stack.callback(run.release)
    run.control_token.write_text(TOKEN)
    done: list[Any] = []

    def answer(request: Any) -> Any:
        done.append(request)
        return Accepted("done")

    control = ControlSocket(run, answer, Nobody())
    stack.callback(control.close)

    def feed(data: bytes) -> None:
        done.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            client = _Client(ours, math.inf)
            control._clients.append(client)
            theirs.sendall(data.replace(b"\n", b" ")[: 1 << 16] + b"\n")
            while client in control._clients:
                control._read(client)
            reply = theirs.recv(1 << 16)
        assert reply.count(b"\n") <= 1, reply
        if done:
            assert json.loads(data.replace(b"\n", b" "))["token"] == TOKEN
        elif reply:
            assert is_reason(json.loads(reply)["error"]), reply

    return feed


TOKEN = "0123456789abcdef0123456789abcdef"


def requests() -> list[bytes]:
    """Of other commands, with the token."""
    return [
        json.dumps({"token": TOKEN} | values).encode()
        for values in ({"op": "SaveNow"}, {"op": "InjectFault", "fault": "kill:rank=1,step=3"}, {"op": "TakeStacks"})
    ]


def open_leader(stack: ExitStack) -> Feed:
    """What another node's agent reports: nothing of it may break the one that leads."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ttprun-fuzz-"))
    node = node_of(Path(folder))
    node.job = recovery.with_size(node.job, 2)
    node.begin_group([(0, 0)], FakePeers())  # type: ignore[arg-type]
    stack.callback(node.run.release)
    leader = part(
        Leader,
        node,
        reports=SimpleNamespace(
            take=lambda slot, message: None,
            checkpoints=SimpleNamespace(take_part=lambda message: None),
            injections=SimpleNamespace(order=lambda fault, by: None),
        ),
        placement=SimpleNamespace(take_records=lambda records: None),
        membership=SimpleNamespace(leave=lambda number, reason: None),
        quiesce_schedule=SimpleNamespace(ask=lambda order, is_end: None),
    )

    def feed(line: bytes) -> None:
        node.verdict = None
        leader.take(1, decode(line, OF_NODES))

    return feed


def open_follower(stack: ExitStack) -> Feed:
    """What the agent that leads orders: nothing of it may break the one that follows."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ttprun-fuzz-"))
    node = node_of(Path(folder))
    node.job = recovery.with_size(node.job, 2)
    node.begin_group([(0, 0)], FakePeers())  # type: ignore[arg-type]
    node.here[0].is_buried, node.here[0].handler = True, Anything()
    stack.callback(node.run.release)
    parts = {one.name: Anything() for one in fields(Follower) if one.init}
    follower = Follower(**parts | {"node": node})

    def feed(line: bytes) -> None:
        node.verdict = None
        follower.take_order(decode(line, OF_NODES))

    return feed


class Anything:
    """Takes any call, and has any attribute."""

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return ""


class FakePeers:
    """Two nodes of one rank each; the first one leads."""

    node, size, ranks_per_node, leader = 0, 2, 1, 0
    is_follower, is_leading, room, address, master = False, True, None, "127.0.0.1", ""

    def node_of(self, rank: int) -> int:
        return rank

    def name_of(self, number: int) -> str:
        return f"node {number}"

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def open_listener(stack: ExitStack) -> Feed:
    """Who comes to an agent's port without the token is hung up on."""
    came: list[Any] = []
    listener = Listener("127.0.0.1", OF_NODES)
    stack.callback(listener.close)
    listener.open(Nobody(), lambda link, hello: came.append((link, hello)))

    def feed(data: bytes) -> None:
        came.clear()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[: 1 << 16] + b"\n")
            theirs.shutdown(socket.SHUT_WR)
            link = Channel(ours, OF_NODES)
            listener._newcomers.append(link)
            while link in listener._newcomers:
                listener._read(link)
        for _, hello in came:
            assert hello.token == listener.where.token

    return feed


def hellos() -> list[bytes]:
    """First messages of other agents; the token is another one each time."""
    return [encode(meeting.Hello("a" * 32, 1, "10.0.0.2", {"the script": "abc"})), encode(node_messages.Leaving("x"))]


def text_target(read: Callable[[str], Any], *errors: type[Exception]) -> Callable[[ExitStack], Feed]:
    """A parser of text: what is no such text raises one of these errors, with one line."""

    def feed(data: bytes) -> None:
        try:
            read(data.decode(errors="replace"))
        except errors as error:
            check(error)

    return lambda stack: feed


def file_target(read: Callable[[Path], Any], *errors: type[Exception]) -> Callable[[ExitStack], Feed]:
    """A reader of a file of the run directory."""

    def opened(stack: ExitStack) -> Feed:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ttprun-fuzz-"))) / "file"

        def feed(data: bytes) -> None:
            path.write_bytes(data)
            try:
                read(path)
            except errors as error:
                check(error)

        return feed

    return opened


def open_status_command(stack: ExitStack) -> Feed:
    """`ttprun status` on a damaged status: shown, or one line."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ttprun-fuzz-")))
    (folder / "control.token").write_text(TOKEN)

    def feed(data: bytes) -> None:
        (folder / "status.json").write_bytes(data)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            try:
                show_status(str(folder))
            except ConfigError as error:
                check(error)

    return feed


def recorded(name: str) -> Callable[[], list[bytes]]:
    """A file of a run directory, as a run has left it."""
    return lambda: [(FOLDER / "run" / name).read_bytes()]


def written(folder: Path) -> Checkpoint:
    """A checkpoint of one rank: its records, and what all ranks share."""
    fd = recorder_with_records()
    try:
        part = Recorder(fd, SLOT_BYTES).export(3)
    finally:
        os.close(fd)
    state = {"arguments": ["train.py"], "header": [["weight", "F32"]], "owners": {"weight": [0]}, "names": {}}
    store = locked(folder / "save")
    draft = store.begin(3)
    draft.add("rank-00000.msgpack", pack(part))
    draft.add("state.msgpack", pack(state))
    draft.add("tensors-00000.safetensors", b"weights")
    made = draft.commit(DESCRIPTION)
    store.unlock()
    return made


def checkpoint_file(name: str) -> tuple[Callable[[], list[bytes]], Callable[[ExitStack], Feed]]:
    """(seeds, feed) of a file of a checkpoint: one that differs from what was written is not resumed from."""

    def seeds() -> list[bytes]:
        with tempfile.TemporaryDirectory(prefix="ttprun-fuzz-") as folder:
            return [written(Path(folder)).file(name).read_bytes()]

    def opened(stack: ExitStack) -> Feed:
        made = written(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ttprun-fuzz-"))))
        path = made.file(name)
        whole = path.read_bytes()

        def feed(data: bytes) -> None:
            path.write_bytes(data)
            found = verify(inspect(made.path))
            assert is_same(data, whole) if found.is_valid else is_reason(found.reason), found.reason
            if name != MANIFEST_NAME:
                path.write_bytes((data + whole)[: len(whole)])  # of the right size, and nobody looks at its content
            try:
                stored = open_checkpoint(inspect(made.path), 0.0)
                stored.rank_part(0)
            except InvalidCheckpointError as error:
                check(error.reason)

        return feed

    return seeds, opened


def is_same(data: bytes, whole: bytes) -> bool:
    """Whether two files are the same, JSON's blanks and order aside; or the checkpoint of another test's folder."""
    if data == whole:
        return True
    found, known = json.loads(data), json.loads(whole)
    return bool(found == known or {**found, **OWN} == {**known, **OWN})


OWN = {"created_at": "", "checksum": ""}  # of each manifest


SLOT_BYTES = 1 << 16


def records() -> list[bytes]:
    """The beginning of a recorder with three boundaries: its header, and the first records."""
    fd = recorder_with_records()
    try:
        return [os.pread(fd, HEADER_BYTES, 0) + b"|" + os.pread(fd, 600, HEADER_BYTES + SLOT_BYTES)]
    finally:
        os.close(fd)


def recorder_with_records() -> int:
    """The descriptor of a recorder with the boundaries 1 to 3, and a log."""
    fd = Recorder.create(SLOT_BYTES)
    recorder = Recorder(fd, SLOT_BYTES)
    for boundary in (1, 2, 3):
        blob = torch.arange(8, dtype=torch.uint8)
        recorder.write(boundary, pack(record_of(boundary, blobs=[8])), [blob])
    recorder.append_log(b"result one")
    recorder.append_log(b"result two")
    return fd


def open_recorder(stack: ExitStack) -> Feed:
    """A rank's records after a stray write of its process: each is whole, or is not there."""

    def feed(data: bytes) -> None:
        head, _, body = data.partition(b"|")
        fd = recorder_with_records()
        try:
            recorder = Recorder(fd, SLOT_BYTES)
            whole = {boundary: recorder.read(boundary) for boundary in (1, 2, 3)}
            log = list(recorder.read_log())
            os.pwrite(fd, head[:HEADER_BYTES], 0)
            os.pwrite(fd, body[:600], HEADER_BYTES + SLOT_BYTES)
            for boundary, known in whole.items():
                assert recorder.read(boundary) in (None, known)
            recorder.read_first()
            found = list(recorder.read_log())
            assert found == log[: len(found)]
            recorder.take_changes(all_of_it=True)
            for read in (recorder.export, lambda number: records_up_to(recorder, number)):
                for boundary in (1, 2, 3, recorder.newest):
                    try:
                        read(boundary)
                    except (KeyError, MalformedRecordError):
                        continue
        finally:
            os.close(fd)

    return feed


def _targets() -> Iterator[Target]:
    yield Target("control socket", requests, open_control)
    yield Target("rank channel", lambda: traffic(channel.KNOWN), feed_codec(channel.KNOWN))
    yield Target("rank channel in pieces", lambda: traffic(channel.KNOWN), open_channel)
    yield Target("node links", lambda: traffic(OF_NODES), feed_codec(OF_NODES))
    yield Target("reports of nodes", lambda: traffic(OF_NODES), open_leader)
    yield Target("orders of the leader", lambda: traffic(OF_NODES), open_follower)
    yield Target("newcomers", hellos, open_listener)
    yield Target("status.json", recorded("status.json"), text_target(parse_status, ValueError))
    yield Target("ttprun status", recorded("status.json"), open_status_command)
    yield Target("events.jsonl", recorded("events.jsonl"), file_target(lambda path: list(read_events(path)), OSError))
    yield Target("history.csv", recorded("history.csv"), file_target(read_history))
    yield Target("topology.json", recorded("topology.json"), file_target(read_topology, OSError, ValueError))
    for name in (MANIFEST_NAME, "state.msgpack", "rank-00000.msgpack"):
        yield Target(name, *checkpoint_file(name))
    faults = [b"kill:rank=1,step=12,phase=backward", b"sleep:rank=0,seconds=3", b"nan:rank=1,step=3"]
    yield Target("faults", lambda: faults, text_target(parse_fault, ValueError))
    yield Target(
        "hosts", lambda: [b"b:4\n\n  a:2  # old\nc\n"], text_target(lambda text: parse_hosts(text, 2), ValueError)
    )
    yield Target("records", records, open_recorder)


TARGETS = {target.name: target for target in _targets()}
