"""What the agent and its ranks send each other: each message comes as it was sent, and all else is refused."""

from __future__ import annotations

import enum
import math
import subprocess
import sys
import types
import typing
from typing import Any

import msgspec
import pytest

from ttprun.agent.lead.coordinator import ACTIONS, Coordinator
from ttprun.agent.lead.reports import _ROWS
from ttprun.agent.node.node_agent import ORDERS, NodeAgent
from ttprun.protocol import from_rank, node_messages, standby_messages
from ttprun.protocol.channel import KNOWN, Order, Report
from ttprun.protocol.codec import Message, Refused, decode, encode
from ttprun.protocol.process_orders import Action, Rewind
from ttprun.protocol.rank_events import RankExited, RankStarted

REPORTS = typing.get_args(Report)


def value_of(hint: Any) -> Any:
    """Some value of a type, nothing of it empty."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return [value_of(arguments[0])] * 2
    if origin is tuple:
        return tuple(map(value_of, [arguments[0]] * 2 if arguments[1:] == (Ellipsis,) else arguments))
    if origin is dict:
        return {value_of(arguments[0]): value_of(arguments[1])}
    if origin in (types.UnionType, typing.Union):
        return value_of(arguments[0])
    if isinstance(hint, type) and issubclass(hint, Message):
        hints = typing.get_type_hints(hint)
        return hint(**{name: value_of(one) for name, one in hints.items() if name in hint.__struct_fields__})
    if origin is typing.Literal:
        return arguments[-1]
    if isinstance(hint, enum.EnumType):
        return list(hint)[1]  # type: ignore[var-annotated]
    return {int: 3, bytes: b"\xff\n", float: 0.5, str: "é \udce9", bool: True, Any: [1, {"a": None}]}[hint]


@pytest.mark.parametrize("kind", KNOWN.values(), ids=KNOWN)
def test_a_message_comes_as_it_was_sent(kind: type) -> None:
    message = value_of(kind)

    line = encode(message)

    assert line.count(b"\n") == 1
    assert decode(line, KNOWN) == message


@pytest.mark.parametrize("kind", KNOWN.values(), ids=KNOWN)
def test_a_message_without_its_fields_or_with_others_is_refused(kind: type) -> None:
    needed = [one.name for one in msgspec.structs.fields(kind) if one.required]

    bare = decode(b'{"op": "%b"}' % kind.__name__.encode(), KNOWN)
    more = decode(encode(value_of(kind)).replace(b"{", b'{"colour": 1, ', 1), KNOWN)

    assert bare == (Refused(f"{kind.__name__}: Object missing required field `{needed[0]}`") if needed else kind())
    assert more == Refused(f"{kind.__name__}: Object contains unknown field `colour`")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"op": "RankRebuilt", "gen', "not JSON (Unterminated string starting at: line 1 column 23 (char 22)): b'{"),
        (b"\xff", "not JSON ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte): b'\\xff'"),
        (b"[" * 100_000, "nested too deeply: b'[[["),
        (b"[1]", "not an object with a str \"op\": b'[1]'"),
        (b'{"op": 1}', 'not an object with a str "op": '),
        (b'{"op": "Rebuild"}', "unknown message 'Rebuild': install the same version of ttprun on both sides"),
        (b'{"op": "RankRebuilt", "generation": "1"}', "RankRebuilt: Expected `int`, got `str` - at `$.generation`"),
        (
            b'{"op": "Prepared", "generation": 1, "boundary": 0, "part": 0, "journal": {}}',
            "Prepared: part: RT_SEND is not a loss",
        ),
        (
            b'{"op": "SchedulerAsked", "what": "stop", "ranks": {"one": 1}}',
            "SchedulerAsked: Expected `int`, got `str` - at `key` in `$.ranks`",
        ),
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(line: bytes, reason: str) -> None:
    found = decode(line, KNOWN)

    assert isinstance(found, Refused)
    assert found.reason.startswith(reason)


def test_messages_of_both_directions_have_names_of_their_own() -> None:
    both = {*REPORTS, *typing.get_args(Order)}

    assert len({kind.__name__ for kind in both}) == len(both) == len(KNOWN)


def test_every_action_of_the_machine_and_every_order_to_a_node_has_exactly_one_row() -> None:
    below = [Action]
    for kind in below:
        below += kind.__subclasses__()
    assert ACTIONS.keys() == {kind for kind in below if not kind.__subclasses__()}
    assert ORDERS.keys() == {*typing.get_args(node_messages.Order)}
    for rows, carrier in ((ACTIONS, Coordinator), (ORDERS, NodeAgent)):
        own = [method for method in rows.values() if "." not in method]
        assert all(hasattr(carrier, method) for method in own)


def test_the_agent_that_leads_takes_every_message_of_a_rank_by_one_table_but_for_what_concerns_its_node_alone() -> None:
    of_its_node = {from_rank.RowChanged, *typing.get_args(standby_messages.Report)}

    assert _ROWS.keys() == {*REPORTS, Refused} - of_its_node


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Rewind((0, 2), 4), "it names rank 2, and the world size is 2"),
        (RankStarted(at_s=1.0, rank=-1, pid=7), "it names rank -1, and the world size is 2"),
        (RankExited.ended(256, at_s=1.0, rank=1, pid=7, boundary=3), "there is no such signal or exit code"),
        (RankExited.ended(-66, at_s=1.0, rank=1, pid=7, boundary=3), "there is no such signal or exit code"),
        (RankExited.ended(1, at_s=1.0, rank=1, pid=7, boundary=3, detected_after_s=math.nan), "a time is out of range"),
        (RankExited.ended(-9, at_s=1.0, rank=1, pid=7, boundary=3), ""),
        (
            RankExited(at_s=1.0, rank=1, pid=7, code=None, signal=None, boundary=3),
            "a process ends with a code or by a signal",
        ),
    ],
)
def test_what_another_node_says_of_ranks_that_are_not_there_is_refused(message: Message, reason: str) -> None:
    assert node_messages.why_unfit(message, 2) == reason


_AT_ONCE = """
import sys, threading
from ttprun.protocol import channel, from_rank
from ttprun.protocol.codec import decode, encode

sys.setswitchinterval(1e-6)
lines = [encode(from_rank.RankFrozen(3, 2, "d", True)), encode(from_rank.RankReplayed(1, 2, 0.5))]
barrier = threading.Barrier(8)


def read():
    barrier.wait()
    for line in lines:
        decode(line, channel.KNOWN)


threads = [threading.Thread(target=read) for _ in range(8)]
for one in threads:
    one.start()
for one in threads:
    one.join()
"""


def test_threads_that_read_the_first_message_of_a_class_at_once_do_not_crash() -> None:
    """msgspec 0.22 crashes if it is asked to read a class while another thread has it look at that class."""
    for _ in range(10):
        subprocess.run([sys.executable, "-c", _AT_ONCE], check=True, timeout=60)
