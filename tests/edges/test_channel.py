"""The line between the agent and a rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from ttprun.protocol import channel
from ttprun.protocol.channel import Channel, Sent
from ttprun.protocol.from_rank import Note
from ttprun.protocol.mindio import SchedulerCall
from ttprun.protocol.to_rank import Heard

Line = tuple[Channel, Channel]


@pytest.fixture
def line() -> Iterator[Line]:
    ours, theirs = channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "message",
    [
        Heard(),
        Note("two\nlines"),
        Note("é \u2028 \x00 \ud800"),
        SchedulerCall("report_result", [[1, 2.5, None, True]] * 50),
    ],
    ids=["empty", "two lines", "odd letters", "nested"],
)
def test_a_message_comes_as_it_was_sent(line: Line, message: Sent) -> None:
    ours, theirs = line

    ours.send(message)

    assert theirs.read_available() == [message]


def test_a_message_larger_than_the_sockets_buffer_arrives(line: Line) -> None:
    ours, theirs = line
    message = Note("x" * (1 << 20))
    sender = threading.Thread(target=ours.send, args=(message,))
    sender.start()

    found = next(theirs.messages())
    sender.join()

    assert found == message


def test_a_rank_that_reads_nothing_keeps_nobody_waiting_and_gets_all_of_it_later(line: Line) -> None:
    ours, theirs = line
    ours.waits = False
    messages = [Note(f"{number} {'x' * 1000}") for number in range(2000)]

    for message in messages:
        ours.send(message)
    found = []
    while len(found) < len(messages):
        found += theirs.read_available()
        ours.flush()

    assert found == messages


def test_messages_of_several_threads_are_not_mixed(line: Line) -> None:
    ours, theirs = line
    threads = [
        threading.Thread(target=lambda n=n: [ours.send(Note(str(n) * 5000)) for _ in range(40)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()

    messages = theirs.messages()
    found = [next(messages) for _ in range(160)]
    for thread in threads:
        thread.join()

    assert sorted(found, key=str) == [Note(str(n) * 5000) for n in range(4) for _ in range(40)]


def test_descriptors_come_with_their_message_and_are_not_inherited(line: Line) -> None:
    ours, theirs = line
    read_end, write_end = os.pipe()
    ours.send(Heard(), [write_end])

    message, fds = theirs.receive_with_fds()
    os.write(fds[0], b"through")

    assert message == Heard()
    assert os.read(read_end, 20) == b"through"
    assert [os.get_inheritable(fd) for fd in fds] == [False]
    for fd in (read_end, write_end, *fds):
        os.close(fd)


def test_what_came_with_the_welcome_in_one_read_is_not_lost(line: Line) -> None:
    ours, theirs = line
    ours.send(Note("1"))
    ours.send(Note("2"))
    ours.close()

    first, _ = theirs.receive_with_fds()

    assert [first, *theirs.messages()] == [Note("1"), Note("2")]


def test_to_send_to_a_process_that_is_gone_is_no_error(line: Line) -> None:
    ours, theirs = line
    theirs.close()

    ours.send(Heard())
    ours.send(Heard(), [0])


def test_the_end_of_the_line_is_said(line: Line) -> None:
    ours, theirs = line
    ours.close()

    with pytest.raises(EOFError):
        theirs.read_available()
    with pytest.raises(EOFError):
        theirs.receive_with_fds()
    assert list(theirs.messages()) == []


class LostSocket:
    """The other end does not answer any more: the kernel says so once, and reads as closed from then on."""

    def __init__(self) -> None:
        self._errors = [TimeoutError(110, "Connection timed out")]

    def send(self, data: bytes, flags: int = 0) -> int:
        raise self._errors.pop()

    def recv(self, size: int) -> bytes:
        return b""


def test_an_end_that_does_not_answer_any_more_is_not_taken_for_closed_if_a_send_has_met_the_error() -> None:
    line = Channel(LostSocket())  # type: ignore[arg-type]
    line.waits = False

    line.send(Heard())

    with pytest.raises(TimeoutError, match="timed out"):
        line.read_available()
