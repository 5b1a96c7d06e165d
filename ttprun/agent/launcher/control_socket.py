"""The control socket in the run directory: what other commands of ttprun ask of a running job, and the answers.

A request must carry the run's token. Nothing that a client does may delay the supervisor, on whose selector this runs:
no read or write waits, a client has CLIENT_LIMIT_S seconds, and there are MOST_CLIENTS at most. Begin with
`ControlSocket.accept` and `Requests.answer`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never, get_args

from ttprun import recovery
from ttprun.agent.base.loop import unwatch
from ttprun.agent.between.agent import Agent
from ttprun.agent.lead.coordinator import Leader
from ttprun.agent.lead.repairs import Repairs
from ttprun.agent.lead.schedules import QuiesceSchedule
from ttprun.agent.lead.writer import CheckpointWriter
from ttprun.agent.node.node_agent import NodeEyes
from ttprun.agent.node.standbys import Standbys
from ttprun.errors import in_short
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.codec import Refused, decode_fields, encode
from ttprun.protocol.control_requests import (
    Accepted,
    DrainNode,
    InjectFault,
    MoveRanks,
    Recall,
    Rejected,
    Reply,
    Request,
    SaveNow,
    TakeStacks,
)

logger = logging.getLogger("ttprun")
KNOWN = {kind.__name__: kind for kind in get_args(Request)}
CLIENT_LIMIT_S = 2.0
MOST_CLIENTS = 16
_REQUEST_LIMIT_BYTES = 1 << 16
_BACKLOG = 64
_ANY = "*"  # device


@dataclass
class _Client:
    """Who has connected.

    unread   what it has said of its request so far
    ends_s   when it is hung up on
    """

    sock: socket.socket
    ends_s: float
    unread: bytes = b""


class ControlSocket:
    """Answers one JSON line with one JSON line, and hangs up.

    answer     called with a request whose token is right; what it returns is the reply; it must not block
    selector   whose keys' data are called when they are ready
    """

    def __init__(self, run: RunDirectory, answer: Callable[[Request], Reply], selector: selectors.BaseSelector) -> None:
        self._run = run
        self._token = run.read_token()
        self._answer = answer
        self._selector = selector
        self._clients: list[_Client] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        with run.control_address() as address:
            self._listener.bind(address)
            os.chmod(address, 0o600)
        self._listener.listen(_BACKLOG)
        selector.register(self._listener, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        """A client is there. If there are too many, the one that has been silent for longest has to go."""
        with contextlib.suppress(OSError):  # it has gone already, or we have no descriptors left
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            client = _Client(sock, time.monotonic() + CLIENT_LIMIT_S)
            self._clients.append(client)
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(client))
        if len(self._clients) > MOST_CLIENTS:
            self._hang_up(self._clients[0])

    def pass_time(self) -> None:
        """Hang up on those that have had their time."""
        now_s = time.monotonic()
        while self._clients and self._clients[0].ends_s <= now_s:
            self._hang_up(self._clients[0])

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(_REQUEST_LIMIT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(client)
            return
        client.unread += data
        line, end, _ = client.unread.partition(b"\n")
        if not end and data and len(client.unread) < _REQUEST_LIMIT_BYTES:
            return
        with contextlib.suppress(OSError, ValueError):  # a reply that it does not take at once is not its to have
            client.sock.send(encode(self._reply(line)))
        self._hang_up(client)

    def _hang_up(self, client: _Client) -> None:
        self._clients.remove(client)
        unwatch(self._selector, client.sock)
        client.sock.close()

    def _reply(self, line: bytes) -> Reply:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):  # nested too deeply
            request = None
        if not isinstance(request, dict):
            return Rejected("a request is a JSON object in one line")
        token = str(request.get("token", "")).encode(errors="surrogatepass")
        if not hmac.compare_digest(token, self._token.encode()):
            return Rejected("the token is wrong")
        request.pop("token")
        decoded: Request | Refused = decode_fields(request, KNOWN)
        if isinstance(decoded, Refused):
            return Rejected(decoded.reason)
        try:
            return self._answer(decoded)
        except (ValueError, KeyError) as error:
            return Rejected(str(error))

    def close(self) -> None:
        """Stop listening, and hang up on all."""
        for client in list(self._clients):
            self._hang_up(client)
        unwatch(self._selector, self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._run.control_socket.unlink()


def has_devices() -> bool:
    """Whether this machine has accelerators, on which a process and its replacement would not have room together."""
    return any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "davinci[0-9]*"))


@dataclass
class Requests:
    """Answers requests.

    inject, eyes, repairs, leader   of the present group of ranks; None: there was none yet
    """

    node: Agent
    checkpoint_writer: CheckpointWriter
    quiesce_schedule: QuiesceSchedule
    standbys: Standbys
    stack_reports: int = 0
    inject: Callable[[str], str] | None = None
    eyes: NodeEyes | None = None
    repairs: Repairs | None = None
    leader: Leader | None = None
    _moved: dict[int, str] = field(default_factory=dict)  # stragglers: why not; "": they were

    def answer(self, request: Request) -> Reply:
        """The reply to a request. Raises ValueError if it cannot be carried out."""
        if self.node.verdict is not None:
            return Rejected("the run has ended")
        match request:
            case InjectFault(fault=fault):
                return self._inject_fault(fault)
            case SaveNow():
                return self._checkpoint_now()
            case Recall():
                return self._call_back()
            case TakeStacks():
                return self._take_stacks()
            case MoveRanks(ranks=ranks, ends_first=ends_first, device=device):
                return self._move(ranks, "ttprun move", ends_first, device)
            case DrainNode(node=node):
                return self._drain(node)
            case _:
                assert_never(request)

    def _inject_fault(self, fault: str) -> Reply:
        if not self.node.config.allow_faults:
            return Rejected("this run was started without --allow-faults")
        if self.inject is None:
            raise ValueError("the ranks have not been started yet")
        return Accepted(self.inject(fault))

    def _checkpoint_now(self) -> Reply:
        """Have a checkpoint written, at a boundary from which a run can resume if one comes soon."""
        node = self.node
        why_not = self._why_not("the framework writes its own checkpoints") or str(recovery.why_not_saved(node.job))
        if why_not:
            return Rejected(why_not)
        number = 0 if self.checkpoint_writer.status is None else self.checkpoint_writer.status.number
        self.quiesce_schedule.ask(lambda: node.advance(recovery.CheckpointAsked(at_s=time.monotonic())), is_end=False)
        return Accepted(after=number)

    def _why_not(self, of_mindio: str) -> str:
        """Why nothing can be asked of all ranks here and now; "" if it can.

        of_mindio   who does it with --mindio
        """
        node = self.node
        if node.verdict is not None:
            return "the run has ended"
        if node.peers.is_follower:
            return f"ask on {node.peers.leaders_name}, whose agent leads"
        if node.is_broken:
            return "ttprun's supervisor has failed: the job runs as under torchrun"
        if node.config.mindio:
            return f"{of_mindio} (--mindio)"
        return "" if node.job.phase is recovery.JobPhase.RUNNING else f"the job is {node.job.phase}; ask again"

    def move_straggler(self, rank: int) -> None:
        """The others have waited for a rank for long: a new process takes its place, once, on a free device if any."""
        done = self._moved.get(rank)
        if done == "" or self.standbys.is_on_its_way:
            return
        reply = self._move((rank,), "it held the others up", device=_ANY)
        self._moved[rank] = why_not = reply.error if isinstance(reply, Rejected) else ""
        if why_not and why_not != done:
            logger.warning("rank %d holds the others up, and is not moved: %s", rank, why_not)

    def _move(self, ranks: tuple[int, ...], reason: str, ends_first: bool = False, device: str = "") -> Reply:
        """Have new processes take the places of healthy ranks, which is a repair without a fault.

        device   of the only rank's new process; "": the same; _ANY: one that is free, else the same
        """
        node = self.node
        if not {*ranks} <= {*range(len(node.slots))}:
            raise ValueError(f"there are ranks 0 to {len(node.slots) - 1}")
        why_not = self._why_not("the scheduler asks for a hot switch")
        why_not = why_not or str(recovery.why_not_replaceable(node.job, ranks))
        if why_not:
            return Rejected(why_not)
        to = ""
        if device and node.is_here(ranks[0]):
            to = self.standbys.preloads.give(node.process(ranks[0]), node.here, device.removeprefix(_ANY))
        if device not in (_ANY, to):
            return Rejected(f"the node of rank {ranks[0]} has no device {device} that no rank has")
        before, is_kept = node.job.incident_count, not (ends_first or (has_devices() and not to))
        node.advance(recovery.ReplacementAsked(at_s=time.monotonic(), ranks=ranks, reason=reason, is_kept=is_kept))
        return Accepted(after=before, ranks=ranks)

    def _drain(self, number: int) -> Reply:
        """Have a node that waits take the place of one that trains, once all ranks stand still."""
        node, peers, leader = self.node, self.node.peers, self.leader
        if leader is None:
            raise ValueError("the ranks have not been started yet")
        if not 0 <= number < peers.size:
            raise ValueError(f"there are nodes 0 to {peers.size - 1}")
        before = node.job.incident_count
        why_not = self._why_not("the scheduler asks for a hot switch") or leader.placement.drain(number, "ttprun drain")
        first = number * peers.ranks_per_node
        ranks = tuple(range(first, first + peers.ranks_per_node))
        return Rejected(why_not) if why_not else Accepted(after=before, ranks=ranks)

    def _take_stacks(self) -> Reply:
        """Have the stacks of this node's ranks written."""
        before = self.stack_reports
        self.stack_reports += 1
        if self.eyes is not None:
            self.eyes.write_when_taken(self.stack_reports)
        elsewhere = [slot.rank for slot in self.node.slots if not slot.is_here]
        what = f"ranks {in_short(list(map(str, elsewhere)))} are on other nodes: ask there" if elsewhere else ""
        return Accepted(what, after=before)

    def _call_back(self) -> Reply:
        """Have the ranks that are away train again."""
        ranks = ", ".join(map(str, self.node.job.away))
        why_not = "no rank is away" if self.repairs is None else self.repairs.call_back("ttprun recall")
        return Rejected(why_not) if why_not else Accepted(f"rank {ranks} called back")
