"""What a rank records is read back while it lives: what a replacement could not restore is named at the first steps."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tests.capture.records import record_of
from tests.capture.test_said_at_the_step import BEGIN, STEP, in_a_for
from tests.capture.test_said_at_the_step import run as hindrances_of
from tests.rank.fakes import make_session
from tests.rank.processes import run_alone
from tests.rank.worlds import run_world
from ttprun.capture import recording, values
from ttprun.capture.position import user_code
from ttprun.capture.recording import Rehearsal
from ttprun.capture.records.nodes import RefusedNode
from ttprun.capture.records.packing import BoundaryRecord
from ttprun.capture.records.recorder import Recorder
from ttprun.capture.values import data_trees
from ttprun.introspect import ownership
from ttprun.introspect.current_rank import current
from ttprun.protocol import from_rank
from ttprun.protocol.board import Field

GENERATOR = "(n for n in range(9) for _ in range(1))"
OF_OPTIMIZER = f"optimizer.tickets = {GENERATOR}; next(optimizer.tickets)"
OF_SCRIPT = f"tickets = {GENERATOR}; next(tickets)"
WHAT = "it is the generator <genexpr>, which does not show the positions of its loops"
CURE = "run over it by a `for` loop of your own, or count its items and take them by index"


def test_what_a_closure_gives_and_no_record_holds_is_said_at_the_first_step_and_not_when_a_rank_has_died() -> None:
    begun = "def begun(items):\n    next(items)\n    return items\n"
    closure = f"lambda: (second(first(torch.ones(1, 2))).sum().backward(), begun({GENERATOR}))[1]"
    step = f"    optimizer.zero_grad()\n    optimizer.step({closure})\n    note()\n"

    found = hindrances_of(f"{BEGIN}{begun}for step in range(3):\n{step}")

    assert found[0].startswith("the closure's result cannot be recorded: it is the generator"), found


def test_a_variable_that_comes_later_is_reported_once_it_is_met() -> None:
    """Its name is a new one, and that is what has the records read back once more."""
    sentences, _ = run_world(_reported, in_a_for(f"{OF_SCRIPT}", at=3))[0]

    assert sentences == [[f"<module>: tickets cannot be recorded: {WHAT}; {CURE}"]]


def test_what_an_optimizer_keeps_is_reported_by_its_path() -> None:
    source = f"{BEGIN}{OF_OPTIMIZER}\nfor step in range(3):\n    optimizer.zero_grad(){STEP}"

    sentences, _ = run_world(_reported, source)[0]

    assert sentences == [[f"<module>: optimizer.tickets cannot be recorded: {WHAT}; {CURE}"]]


def test_a_variable_that_no_record_holds_is_reported_by_its_path_with_what_it_is_and_the_cure() -> None:
    source = f"{BEGIN}held = {{'a': [{GENERATOR}]}}\nnext(held['a'][0])\nfor step in range(3):\n    optimizer.zero_grad(){STEP}"

    sentences, rehearsed = run_world(_reported, source)[0]

    assert sentences == [[f"<module>: held['a'][0] cannot be recorded: {WHAT}; {CURE}"]]
    assert rehearsed >= 1


def test_a_script_of_which_all_is_recorded_passes_and_nothing_is_reported() -> None:
    sentences, rehearsed = run_world(_reported, f"{BEGIN}for step in range(3):\n    optimizer.zero_grad(){STEP}")[0]

    assert (sentences, rehearsed >= 1) == ([], True)


def _reported(rank: int, source: str) -> tuple[list[list[str]], int]:
    """What is reported while the script runs, and the newest boundary whose record has been read back."""
    session = current()
    assert session is not None
    sent: list[list[str]] = []
    send = session.channel.send

    def listen(message: Any, *args: Any) -> None:
        if isinstance(message, from_rank.NotProved) and message.is_unrecorded:
            sent.append([*map(str, message.reasons)])
        send(message, *args)

    session.channel.send = listen  # type: ignore[method-assign]
    ownership.add_user_directory("/script")
    scope: dict[str, Any] = {"__name__": "script", "note": lambda: None}
    scope["__builtins__"] = vars(__import__("builtins")) | user_code.BUILTINS
    code = user_code.compile_followed(source.encode(), "/script/script.py")
    script = threading.Thread(target=exec, args=(code, scope))
    script.start()
    script.join()
    return sent, session.row[Field.REHEARSED]


def record_with(boundary: int, **variables: Any) -> tuple[BoundaryRecord, bytes]:
    record = record_of(boundary, variables=[values.Snapshot({}).variables(variables)])
    return record, values.pack(record)


def test_a_large_record_takes_a_small_share_of_the_steps_and_is_read_on_from_step_to_step() -> None:
    assert run_alone(_steps_until_read) > 3


def nested(depth: int) -> list[Any]:
    """Lists of lists, 8 in each."""
    return [nested(depth - 1) for _ in range(8)] if depth else []


def _steps_until_read() -> int:
    session, clock = make_session(), Clock()
    recording.time = clock  # type: ignore[assignment]
    data_trees.MANY = 1 << 40  # it is no data
    rehearsal = Rehearsal()
    for boundary in range(1, 1000):
        record, head = record_with(boundary, held=nested(4))
        session[Recorder].write(boundary, head, [])
        rehearsal.note(session[Recorder], record, head, is_strict=False)
        clock.now_s += 0.1  # the step
        if rehearsal.go_on(lambda: False):
            return boundary
        assert rehearsal._used_s <= recording.SHARE * clock.now_s + 2 * Clock.LOOK_S
    raise AssertionError("it is never read to its end")


class Clock:
    """Each look at it takes a moment, in which some nodes are read."""

    LOOK_S = 0.0001

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += self.LOOK_S
        return self.now_s


def test_while_the_rank_waits_for_others_the_record_is_read_at_once() -> None:
    assert run_alone(_reads_in_the_wait) == 1


def _reads_in_the_wait() -> int:
    session, rehearsal = make_session(), Rehearsal()
    record, head = record_with(1, held=nested(4))
    session[Recorder].write(1, head, [])
    rehearsal.note(session[Recorder], record, head, is_strict=False)
    return rehearsal.go_on(lambda: True)


def test_it_is_repeated_when_the_set_of_variables_changes_and_not_at_each_step() -> None:
    assert run_alone(_when_it_is_repeated) == [1, 2, 5]


def _when_it_is_repeated() -> list[int]:
    session, rehearsal, read = make_session(), Rehearsal(), []
    for boundary in range(1, 9):
        record, head = record_with(boundary, **{"a": [1.0], "step": boundary} | ({"b": [2]} if boundary >= 5 else {}))
        session[Recorder].write(boundary, head, [])
        rehearsal.note(session[Recorder], record, head, is_strict=False)
        read.append(rehearsal.go_on(lambda: True))
    return [one for one in read if one]


def test_a_record_that_cannot_be_read_back_is_no_promise() -> None:
    assert "the record of boundary 1 cannot be read back" in run_alone(_of_a_broken_record)


def _of_a_broken_record() -> str:
    session, rehearsal = make_session(), Rehearsal()
    record, head = record_with(1, held=[1])
    session[Recorder].write(1, head[: len(head) // 2], [])
    rehearsal.note(session[Recorder], record, head, is_strict=False)
    rehearsal.go_on(lambda: True)
    return "; ".join(map(str, rehearsal.refused))


def test_by_strict_proof_each_variable_that_cannot_be_restored_is_a_reason() -> None:
    assert run_alone(_strictly) == [1, 0]


def _strictly() -> list[int]:
    session, rehearsal = make_session(), Rehearsal()
    record, _ = record_with(1, held=torch.ones(1))
    record.variables[0]["held"] = RefusedNode("is a coroutine")
    head = values.pack(record)
    session[Recorder].write(1, head, [])
    rehearsal.note(session[Recorder], record, head, is_strict=True)
    rehearsal.go_on(lambda: True)
    return [len(rehearsal.refused), len(rehearsal.unrecorded)]
