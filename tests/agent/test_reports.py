"""What becomes of what ranks report: the real state machine decides, and nothing that it orders is carried out."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from tests.agent.nodes import NothingFails, part
from ttprun import recovery
from ttprun.agent.base.ground import Failure, FaultInjection, FirstFailure
from ttprun.agent.base.peers import Peers
from ttprun.agent.between.agent import Follower
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.incidents import Protection, grouped
from ttprun.agent.lead.repairs import Replays
from ttprun.agent.lead.reports import _ROWS, Reports
from ttprun.agent.lead.rows import Lead, Row, Wire
from ttprun.agent.node.node_agent import NodeAgent
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import read_topology
from ttprun.protocol import from_rank, node_messages, to_rank
from ttprun.protocol.board import Board
from ttprun.protocol.channel import KNOWN, Channel
from ttprun.protocol.codec import decode
from ttprun.protocol.from_rank import RankProtected
from ttprun.protocol.rank_events import Event, RankExited, RankStarted
from ttprun.protocol.reason import Reason
from ttprun.recovery.replicas import Replicas

N_RANKS = 3
SCRIPT_ERROR = from_rank.ScriptError("no file", traceback="no file caf\udce9\n", detail="", device_fault="")


class FakeHandler:
    """A rank's process and line: notes what it is sent."""

    def __init__(self) -> None:
        self.reported: list[Any] = []

    @property
    def channel(self) -> FakeHandler:
        return self

    def send(self, message: Any) -> None:
        self.reported.append(message)


class Own:
    """Passes on what ranks report to each other, and carries out nothing else."""

    def __init__(self, node: FakeNode) -> None:
        self._node = node

    def carry_out(self, order: Any) -> None:
        for rank, put in order.puts if isinstance(order, node_messages.Broadcast) else ():
            for slot in self._node.slots:
                if slot.rank != rank:
                    slot.send_if_present(put)

    def forward(self, rank: int, pid: int, message: Any) -> None: ...


class FakeNode(Lead):
    """Three ranks that train, as the state machine sees them."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder)
        self.domains = NothingFails()
        self._board = Board.create(N_RANKS)[1]
        self.peers = Peers(ranks_per_node=N_RANKS)
        self.handlers = [FakeHandler() for _ in range(N_RANKS)]
        self.slots = [Row(rank, rank, self.forward) for rank in range(N_RANKS)]  # type: ignore[arg-type]
        self.job = recovery.new_job(recovery.Settings(world_size=N_RANKS))
        self.here = self.slots
        self.config = SimpleNamespace(snapshot_every="auto", buddy="off", mindio=False)
        self.rungs = frozenset(("replace",))
        for slot in self.slots:
            slot.pid, slot.is_present = 100 + slot.rank, True
            self.advance(RankStarted(at_s=0.0, rank=slot.rank, pid=slot.pid))
            self.advance(RankProtected(at_s=0.0, rank=slot.rank))

    def forward(self, rank: int, pid: int, message: Any) -> None:
        self.handlers[rank].channel.send(message)

    def wire(self) -> Wire:
        """Those of all nodes; this one's starts no process, and ends none."""
        return Wire(self, Own(self))  # type: ignore[arg-type]

    def advance(self, event: Event) -> None:
        self.job, _ = recovery.advance(self.job, event)

    def log(self, event: str, **fields: object) -> None: ...


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path)


@pytest.fixture
def reports(node: FakeNode) -> Reports:
    """Its ranks have held the same weights at boundary 1."""
    nobody: Any = None
    times: Any = SimpleNamespace(is_off=True, most_lost="at most some 2 s of work")
    comparisons = Comparisons(node, node.wire(), times, nobody)  # type: ignore[arg-type]
    parts = {"comparisons": comparisons, "injections": FaultInjection(), "protection": Protection(node, set())}  # type: ignore[arg-type]
    found = part(Reports, node, wire=node.wire(), **parts)
    hold(found, node, 1, "aaa")
    for handler in node.handlers:
        handler.reported.clear()
    return found


def hold(reports: Reports, node: FakeNode, boundary: int, digests: str) -> None:
    """Each rank reports the digest of its weights, one letter."""
    for slot, digest in zip(node.slots, digests, strict=True):
        held = {"w": (digest, "gradient")}
        reports.take(
            slot,
            from_rank.Held(
                boundary, is_full=boundary == 1, held=held, names={}, shards={}, groups=[], why_not_stored=""
            ),
        )


def all_compared(node: FakeNode, *, is_off: bool = False) -> Comparisons:
    """All ranks have held the same weights; `is_off`: there are no snapshots."""
    parts: Any = SimpleNamespace(is_off=is_off, why_off="", take_one_at_once=lambda: None), None
    comparisons = Comparisons(node, node.wire(), *parts)  # type: ignore[arg-type]
    hold(part(Reports, node, comparisons=comparisons), node, 1, "abc")
    return comparisons


def test_each_rank_is_sent_word_when_all_have_been_compared_in_full(node: FakeNode, reports: Reports) -> None:
    sent = []
    for slot in node.slots:
        held = {"w": ("b", "gradient")}
        reports.take(slot, from_rank.Held(3, True, held, names={}, shards={}, groups=[], why_not_stored=""))
        sent.append([len(handler.reported) for handler in node.handlers])

    assert sent == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert [handler.reported for handler in node.handlers] == [[to_rank.AllCompared(3)]] * N_RANKS


def test_a_reason_that_comes_back_is_said_again_until_it_has_come_and_gone_three_times(
    node: FakeNode, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    for boundary in range(1, 11):
        reports.take(
            node.slots[1], from_rank.RankHindered(Reason(text="a lock is held" if boundary % 2 else ""), boundary)
        )

    said = [re.sub(" reports: .*", "", line) for line in caplog.messages]
    again = [f"from step {boundary} on a lost rank can be replaced" for boundary in (2, 4, 6)]
    once = "not protected: rank 1"
    assert said == [once, again[0], once, again[1], once, f"{again[2]}; for further changes see 'ttprun status'", once]


def test_several_things_in_one_variable_are_one_sentence_on_the_console() -> None:
    inside = [f"study._storage[{number}].pool (weakref.ref): it holds other objects weakly" for number in range(79)]
    inside.append(f"a key of {inside[0]}")
    others = ["main: game (sim.Game): it can change", "what t.py:7 asks the file system", "rank 1: no loss was left"]

    assert grouped([*others, *inside]) == [*others, f"study: 80 things in it (ttprun status), such as {inside[0]}"]


def test_of_the_process_groups_of_ranks_that_have_ended_nothing_is_left_when_others_begin(
    node: FakeNode, reports: Reports
) -> None:
    """A node that has left takes its ranks with it: their numbers may be too large for the job now."""

    def compare(groups: list[from_rank.Group]) -> dict[str, tuple[int, ...]]:
        for slot in node.slots:
            reports.take(slot, from_rank.Held(3, True, {"w": ("b", "gradient")}, {}, {}, groups, why_not_stored=""))
        return dict(read_topology(node.run.topology).groups)

    assert compare([from_rank.Group("dp", [1, 2])]) == {"dp0": (1, 2)}

    nobody: Any = None
    reports.comparisons = Comparisons(node, node.wire(), nobody, nobody)  # type: ignore[arg-type]

    assert compare([]) == {}


def test_a_diverged_rank_that_stopped_while_a_checkpoint_was_written_is_reported_again_after_the_next_comparison(
    node: FakeNode, reports: Reports
) -> None:
    odd, line = node.slots[1], node.handlers[1]
    hold(reports, node, 2, "aba")
    hold(reports, node, 3, "aba")  # on its way: it is not reported twice
    reported_once, training = list(line.reported), node.job

    node.advance(recovery.CheckpointAsked(at_s=1.0))
    reports.take(odd, from_rank.StoppedDivergent())
    survivors = node.job.survivors
    node.job = training  # the checkpoint is there, and all go on
    hold(reports, node, 4, "aba")

    assert survivors == (0, 1, 2)
    assert reported_once == [to_rank.StopDivergent()]
    assert line.reported == [to_rank.StopDivergent()] * 2


def test_a_replacement_is_given_what_others_have_sent_in_its_generation_while_there_was_no_process(
    node: FakeNode, reports: Reports
) -> None:
    teller, slot, line = node.slots[1], node.slots[0], node.handlers[0]
    put = from_rank.Put(1, "port 1", "")
    reports.take(teller, from_rank.Put(0, "port 1", ""))
    reports.pass_on()
    line.reported.clear()

    slot.lose(node.board)
    node.advance(RankExited(at_s=1.0, rank=0, pid=100, code=None, signal=9, boundary=0))
    reports.take(teller, put)
    reports.take(slot, put)  # of its own, for the others
    before = list(line.reported)
    reports.take(slot, from_rank.Present(pid=200, main_thread=1))
    reports.pass_on()

    assert node.job.generation == 1
    assert before == []
    assert line.reported == [put]


def test_what_ranks_have_sent_in_an_earlier_generation_is_looked_through_once_and_not_for_each_replacement(
    node: FakeNode, reports: Reports
) -> None:
    slot = node.slots[0]
    reports.take(node.slots[1], from_rank.Put(0, "port 1", ""))
    reports.pass_on()
    slot.lose(node.board)
    node.advance(RankExited(at_s=1.0, rank=0, pid=100, code=None, signal=9, boundary=0))

    reports.take(slot, from_rank.Present(pid=200, main_thread=1))

    assert reports._passed_on == []


def test_ranks_of_whom_nothing_else_is_expected_are_told_to_resume_in_the_same_words(node: FakeNode) -> None:
    nobody: Any = None
    replays = Replays(node, node.wire(), nobody, nobody)  # type: ignore[arg-type]

    replays.resume(to_rank.Resume((0, 1, 2), 1, 4))

    lines = {node_messages.encoded(order, N_RANKS) for one in node.handlers for order in one.reported}
    assert len(lines) == 1  # those of another node cross once


def join_another_node(node: FakeNode, reports: Reports) -> tuple[socket.socket, socket.socket]:
    """Both ends of the connection to the agent of a second node."""
    ours, theirs = socket.socketpair()
    node.peers = Peers(0, "10.0.0.1", 3, {1: ready_pair(ours)}, {0: "10.0.0.1", 1: "10.0.0.2"}, 2)
    reports.wire = node.wire()
    return ours, theirs


def test_what_several_ranks_report_to_all_at_once_crosses_to_another_node_in_one_message(
    node: FakeNode, reports: Reports
) -> None:
    ours, theirs = join_another_node(node, reports)
    puts = [(rank, from_rank.Put(0, f"port {rank}", b"4711")) for rank in range(2)]

    for rank, put in puts:
        reports.take(node.slots[rank], put)
    reports.pass_on()

    with theirs, ours:
        (sent,) = Channel(theirs, {"Broadcast": node_messages.Broadcast}).read_available()
    assert [handler.reported for handler in node.handlers] == [[puts[1][1]], [puts[0][1]], [put for _, put in puts]]
    assert sent == node_messages.Broadcast(puts)


def test_what_lost_ranks_have_recorded_is_voided_once_and_not_for_each_survivor(
    node: FakeNode, reports: Reports
) -> None:
    ours, theirs = join_another_node(node, reports)
    node.advance(RankExited(at_s=1.0, rank=0, pid=100, code=None, signal=9, boundary=4))

    for slot in node.slots[1:]:
        reports.take(slot, from_rank.RankFrozen(1, 4, "w", True))

    with theirs, ours:
        sent = Channel(theirs, {"VoidBeyond": node_messages.VoidBeyond}).read_available()
    assert sent == [node_messages.VoidBeyond(4)]


def test_a_node_that_does_not_lead_passes_on_what_is_reported_to_all_but_to_who_has_reported_it(node: FakeNode) -> None:
    put = from_rank.Put(0, "port 1", b"4711")
    follower = part(Follower, node, orders=part(NodeAgent, node))

    follower.take_order(node_messages.Broadcast([(1, put)]))

    assert [handler.reported for handler in node.handlers] == [[put], [], [put]]


def ready_pair(sock: socket.socket) -> Channel:
    """An agent's end of a connection."""
    link = Channel(sock)
    link.waits = False
    return link


def test_a_traceback_with_a_name_that_is_no_text_is_shown_all_the_same(
    node: FakeNode, reports: Reports, capfd: pytest.CaptureFixture[str]
) -> None:
    reports.take(node.slots[0], SCRIPT_ERROR)

    assert capfd.readouterr().err == "no file caf\\udce9\n"
    assert node.slots[0].script_error == "no file"


def test_a_traceback_that_nobody_reads_does_no_harm(node: FakeNode, reports: Reports) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    kept = os.dup(2)
    os.dup2(writer, 2)
    try:
        reports.take(node.slots[0], SCRIPT_ERROR)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)

    assert node.slots[0].script_error == "no file"


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"op": "Freeze"}',
        b'{"op": "RankFrozen"}',
        b'{"op": "RankFrozen", "generation": 1, "boundary": "2"}',
    ],
)
def test_what_is_no_message_of_a_rank_is_ignored_with_a_reason(
    node: FakeNode, reports: Reports, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    job = node.job

    reports.take(node.slots[1], decode(line, KNOWN))

    assert node.job == job
    (record,) = caplog.records
    assert record.message.startswith("a message of rank 1 is ignored: ")


@pytest.mark.parametrize(
    ("rungs", "is_off", "words"),
    [
        (None, False, ["no snapshot is taken yet (--snapshot-every auto)", "all ranks start again from the top"]),
        (None, True, ["no snapshots are taken (--snapshot-every)", "all ranks start again from the top"]),
        ({"replace", "restart"}, False, ["no snapshots are taken", "all ranks start again from the top"]),
    ],
)
def test_before_the_first_snapshot_the_console_says_what_really_happens_to_a_rank_whose_state_nobody_else_holds(
    node: FakeNode, caplog: pytest.LogCaptureFixture, rungs: set[str] | None, is_off: bool, words: list[str]
) -> None:
    if rungs is not None:
        node.job = replace(node.job, settings=replace(node.job.settings, rungs=frozenset(rungs)))

    all_compared(node, is_off=is_off)

    assert all(one in caplog.text for one in words), caplog.text
    assert "go back to" not in caplog.text


def test_from_the_first_snapshot_on_the_console_promises_it(
    node: FakeNode, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    comparisons: Any = reports.comparisons
    replicas = Replicas(compared_at=1, shards={"w": (0, 1, 2)})
    node.job = replace(node.job, in_memory=(recovery.Saved(4),), replicas=replicas)

    comparisons.note_snapshot()

    cost = "all ranks go back to the snapshot of step 4, and the steps since then are lost: at most some 2 s of work"
    assert f"the first snapshot is taken: if a rank is lost, {cost}" in caplog.text


MIRRORED = from_rank.StateMirrored(boundary=2, bytes=1 << 20, why_no_step="a gradient is sparse")
SLOW = from_rank.StateMirrored(boundary=9, why_not="a copy takes 7 ms, and a step 16 ms")


def test_the_console_says_what_mirrors_take_once_all_have_reported_and_again_only_what_is_new(
    node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node.config.buddy = "on"
    comparisons = all_compared(node)
    reports = [(0, MIRRORED), (1, MIRRORED), (2, MIRRORED), (2, MIRRORED), (1, SLOW)]

    said = []
    for rank, report in reports:
        comparisons.note_mirrored(node.slots[rank], report)
        said.append(len(caplog.records))

    assert said == [0, 0, 2, 2, 3]
    first, no_step, second = [record.message for record in caplog.records]
    assert "ranks 0, 1, 2 each hold what no other rank holds: mirrored in 3.0 MiB of memory (--buddy off to" in first
    assert no_step.startswith("inside its step a rank is not replaced: a gradient is sparse")
    assert "ranks 0, 2 each hold what no other rank holds: mirrored in 2.0 MiB" in second
    assert "rank 1 holds what no other rank holds, not mirrored: a copy takes 7 ms, and a step 16 ms; " in second
    assert node.job.replicas.mirrored == {0, 2}


def test_with_the_next_node_there_a_lost_node_takes_only_mirrors_with_it_that_found_no_room_there(
    node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    nobody: Any = None
    node.peers = Peers(ranks_per_node=1, size=3, links={1: nobody, 2: nobody}, names={2: "10.0.0.3"})
    node.config.buddy = "node"
    comparisons = all_compared(node)
    for slot in node.slots:
        comparisons.note_mirrored(slot, MIRRORED)
    copied = from_rank.MirrorCopied(of=1, boundary=5, bytes=2 << 20, limit_bytes=1 << 20, why_not="too little memory")
    comparisons.note_mirror_copied(node.slots[2], copied)

    comparisons.lose_mirrors([0])
    copied = node.job.replicas.mirrored
    comparisons.lose_mirrors([1])
    not_copied = node.job.replicas.mirrored

    assert copied == {0, 1, 2}
    assert not_copied == {0, 2}
    assert "the mirror of rank 1, which takes 2.0 MiB, is not kept on node 2 (10.0.0.3): too little memory" in (
        caplog.records[-1].message
    )
    assert not any(sent == to_rank.DropReduced(True) for one in node.handlers for sent in one.reported)


@pytest.mark.parametrize(
    ("is_on_next_node", "where"),
    [(True, "and once more on the next node"), (False, "lost with its node (not so: --buddy node)")],
)
def test_on_several_nodes_the_console_says_whether_a_lost_node_takes_the_mirrors_with_it(
    node: FakeNode, caplog: pytest.LogCaptureFixture, is_on_next_node: bool, where: str
) -> None:
    node.peers = Peers(ranks_per_node=1, size=3)
    node.config.buddy = "node" if is_on_next_node else "on"
    comparisons = all_compared(node)

    for slot in node.slots:
        comparisons.note_mirrored(slot, MIRRORED)

    assert f"mirrored in 3.0 MiB of memory, {where} (--buddy off to save it)" in "".join(caplog.messages)


@pytest.mark.parametrize(
    ("ranks_per_node", "mesh", "may"),
    [(4, "shard", True), (2, "shard", True), (1, "shard", False), (4, "", False)],
    ids=["one node", "shards in a node", "shards over nodes", "no mesh"],
)
def test_hsdp_drops_what_reductions_are_made_of_while_each_rank_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks_per_node: int, mesh: str, may: bool
) -> None:
    monkeypatch.setattr(f"{__name__}.N_RANKS", 4)
    node, nobody = FakeNode(tmp_path), None
    node.peers, node.config.buddy = Peers(ranks_per_node=ranks_per_node, size=4 // ranks_per_node), "on"
    comparisons: Any = Comparisons(node, node.wire(), SimpleNamespace(is_off=True), nobody)  # type: ignore[arg-type]
    comparisons._looks = replace(comparisons._looks, replicas=Replicas(compared_at=1, shards={"w": (0, 1, 0, 1)}))
    for rank in range(4):
        shard = from_rank.Group(mesh, [0, 1] if rank < 2 else [2, 3])
        comparisons._groups[rank] = [shard, from_rank.Group("copy", [rank % 2, rank % 2 + 2])]

    comparisons._share_out_mirrors()
    ordered = [comparisons._mirrors.order_for(slot.rank) for slot in node.slots]
    said = [handler.reported[-1:] for handler in node.handlers]
    if may:
        comparisons.note_mirrored(node.slots[2], SLOW)

    assert said == [[to_rank.DropReduced(True)] if may else []] * 4
    assert [order is not None and order.is_of_results for order in ordered] == [may] * 4
    assert not may or [handler.reported[-1] for handler in node.handlers] == [to_rank.DropReduced(False)] * 4


def test_each_row_of_the_table_names_something_that_takes_a_message() -> None:
    parts = get_type_hints(Reports)

    for row in _ROWS.values():
        first, _, rest = row.take.partition(".")
        assert hasattr(parts[first] if rest else Reports, rest or first), row


CAUSE = Failure(1, 101, 1, "ValueError: loss is negative", "Traceback: ...")
COLLATERAL = Failure(0, 100, 1, "RuntimeError: allreduce: Connection closed by peer [127.0.0.1]:4711")


@pytest.mark.parametrize(
    "failures",
    [
        [(CAUSE, True), (Failure(2, 102, -9), False)],
        [(COLLATERAL, True), (CAUSE, False)],
        [(Failure(0, 100, -9), True), (CAUSE, True)],
    ],
    ids=["it comes first", "a broken connection is seen before it", "another one was repaired"],
)
def test_the_first_failure_that_is_not_collateral_is_the_cause_of_the_others(
    failures: list[tuple[Failure, bool]],
) -> None:
    first = FirstFailure()

    for failure, is_new_incident in failures:
        first.note(failure, is_new_incident)

    assert first.found is CAUSE


def test_torch_reports_the_traceback_of_the_cause(tmp_path: Path) -> None:
    reported = CAUSE.as_torch_reports_it(0, str(tmp_path / "error.json"))

    assert reported.message["extraInfo"]["py_callstack"] == "Traceback: ..."  # type: ignore[index]
    assert (reported.exitcode, reported.pid) == (1, 101)


def test_an_error_file_that_record_has_written_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "by record", "extraInfo": {"timestamp": "5"}}}))

    reported = CAUSE.as_torch_reports_it(0, str(path))

    assert reported.message["message"] == "by record"  # type: ignore[index]


def test_a_failure_of_which_nothing_is_known_is_reported_all_the_same(tmp_path: Path) -> None:
    reported = Failure(0, 0, 1, "the ranks differ").as_torch_reports_it(0, str(tmp_path / "error.json"))

    assert reported.error_file == "<N/A>"


def test_the_event_log_has_what_a_rank_that_is_alone_keeps_of_its_own_state(node: FakeNode) -> None:
    logged: list[dict[str, Any]] = []
    node.log = lambda event, **fields: logged.append({"event": event, **fields})  # type: ignore[method-assign]
    reports = part(Reports, node, protection=Protection(node, set()))

    reports.take(node.slots[1], from_rank.OwnStateKept(boundary=4, bytes=1 << 20))

    kept = {"boundary": 4, "bytes": 1 << 20, "took_s": 0.0, "why_not": ""}
    assert logged == [{"event": "own_state", "rank": 1, **kept}]
