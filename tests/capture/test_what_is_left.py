"""What a rank leaves behind for its replacement: records, results, random states; and its output, line by line."""

from __future__ import annotations

import io
import os
import random
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rank.fakes import RECORD_BYTES, become, make_session
from tests.rank.processes import run_alone
from ttprun.capture.effects import origins, output, script_files
from ttprun.capture.records.recorder import (
    APPENDED_FILES,
    LOG_BYTES,
    SLOTS,
    WORKER_BATCHES,
    WORKER_ENTRY_BYTES,
    Recorder,
    RecordTooLargeError,
)
from ttprun.groups.operations import Entry
from ttprun.groups.results import SELDOM, Answers, Results
from ttprun.introspect import ownership, random_state
from ttprun.protocol.board import Field
from ttprun.rank.bootstrap import patch_table, reset
from ttprun.tensors import gradients

# The recorder.


@pytest.fixture
def recorder() -> Any:
    fd = Recorder.create(RECORD_BYTES)
    yield Recorder(fd, RECORD_BYTES)
    os.close(fd)


def test_a_record_is_read_by_another_process_as_it_was_written() -> None:
    fd = Recorder.create(RECORD_BYTES)
    pid = os.fork()
    if pid == 0:
        blobs = [torch.arange(3.0), torch.zeros(0), torch.ones(2, 2, dtype=torch.bfloat16)]
        Recorder(fd, RECORD_BYTES).write(7, b"head", blobs)
        os._exit(0)
    os.waitpid(pid, 0)

    found = Recorder(fd, RECORD_BYTES).read(7)

    os.close(fd)
    assert found is not None
    assert found[0] == b"head"
    assert found[1][:12] == np.arange(3, dtype=np.float32).tobytes()
    assert len(found[1]) == 12 + 8


def test_the_newest_boundaries_are_there_and_older_ones_are_not(recorder: Recorder) -> None:
    for boundary in range(1, 11):
        recorder.write(boundary, str(boundary).encode(), [])

    found = {boundary: recorder.read(boundary) for boundary in range(12)}

    expected = {boundary: (str(boundary).encode(), b"") for boundary in range(11 - SLOTS, 11)}
    assert {boundary: record for boundary, record in found.items() if record} == expected


def test_a_rank_killed_while_it_writes_a_record_leaves_the_older_ones(recorder: Recorder) -> None:
    class Killed(torch.Tensor):
        nbytes = 4  # type: ignore[assignment]

        def data_ptr(self) -> int:
            raise KeyboardInterrupt

    for boundary in range(1, 6):
        recorder.write(boundary, b"whole", [])
    with pytest.raises(KeyboardInterrupt):
        recorder.write(6, b"half", [Killed()])

    assert recorder.read(6) is None
    assert [recorder.read(boundary) for boundary in (3, 4, 5)] == [(b"whole", b"")] * 3


def test_a_record_that_is_too_large_says_which_setting_makes_room(recorder: Recorder) -> None:
    recorder.write(1, b"old", [])

    with pytest.raises(RecordTooLargeError, match="raise record_limit_mib, now 1"):
        recorder.write(1 + SLOTS, b"", [torch.zeros(RECORD_BYTES)])

    assert recorder.read(1) == (b"old", b"")


def test_a_full_log_of_results_takes_no_more_and_keeps_what_it_has(recorder: Recorder) -> None:
    big = b"x" * (LOG_BYTES // 4)

    taken = [recorder.append_log(big) for _ in range(5)]

    assert taken == [True, True, True, False, False]
    assert recorder.append_log(b"small")
    assert list(recorder.read_log()) == [big] * 3 + [b"small"]


def test_the_states_of_workers_are_found_by_their_place_until_the_ring_has_gone_on(recorder: Recorder) -> None:
    for batch in range(WORKER_BATCHES + 3):
        recorder.write_worker((1, 0, 2, batch), f"state {batch}".encode())
    recorder.write_worker((1, 0, 3, 5), b"x" * WORKER_ENTRY_BYTES)

    found = [recorder.read_worker((1, 0, 2, batch)) for batch in (0, 2, 3, WORKER_BATCHES + 2)]

    assert found == [b"state 0", None, b"state 3", f"state {WORKER_BATCHES + 2}".encode()]
    assert list(recorder.worker_states(1, 2)) == [(0, 0), *((0, batch) for batch in range(3, WORKER_BATCHES + 3))]
    assert recorder.worker_states(5, 2) == {}
    assert recorder.read_worker((1, 1, 2, 5)) is None
    assert recorder.read_worker((1, 0, 3, 5)) is None


def test_counts_of_more_files_than_there_is_room_for_are_not_mixed(recorder: Recorder) -> None:
    keys = [script_files.key_of(f"/log/{number}") for number in range(APPENDED_FILES + 5)]
    for number, key in enumerate(keys):
        recorder.set_appended(key, (1, number, 0))

    found = [recorder.appended(key) for key in keys]

    assert found[:APPENDED_FILES] == [(1, number, 0) for number in range(APPENDED_FILES)]
    assert found[APPENDED_FILES:] == [(0, 0, 0)] * 5


# Results.


def kept(results: Results, place: str, *outputs: torch.Tensor) -> None:
    entry = Entry(None, "broadcast", (), list(outputs))  # type: ignore[arg-type]
    entry.place = place
    results.keep(entry)


def answered(answers: Answers, place: str, newest: int, like: torch.Tensor) -> Any:
    output = torch.full_like(like, 99)
    return output.tolist() if answers.answer(place, [output], newest) else None


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replay_is_answered_what_the_collective_gave(dtype: torch.dtype, recorder: Recorder) -> None:
    results = Results(recorder)
    given = torch.tensor([[1, 0], [1, 1]]).to(dtype).t()
    kept(results, "train.py:3", given)

    answers = Answers(recorder.read_log(), [])

    assert answered(answers, "train.py:3", 0, torch.zeros(2, 2, dtype=dtype)) == given.tolist()


def test_calls_from_one_place_are_answered_in_their_order_and_only_as_often_as_there_were(recorder: Recorder) -> None:
    results = Results(recorder)
    for value in (1.0, 2.0):
        kept(results, "train.py:3", torch.tensor([value]))

    answers = Answers(recorder.read_log(), [])

    like = torch.zeros(1)
    assert [answered(answers, "train.py:3", 0, like) for _ in range(3)] == [[1.0], [2.0], None]
    assert answered(answers, "train.py:4", 0, like) is None


def test_a_replay_is_answered_by_the_newest_step_that_it_may_know(recorder: Recorder) -> None:
    results = Results(recorder)
    for step in range(4):
        results.begin_step(step)
        kept(results, "train.py:9", torch.tensor([float(step)]))

    found = [answered(Answers(recorder.read_log(), []), "train.py:9", newest, torch.zeros(1)) for newest in range(4)]

    assert found == [[0.0], [1.0], [2.0], [3.0]]


def test_a_result_of_another_size_is_no_answer(recorder: Recorder) -> None:
    kept(Results(recorder), "train.py:3", torch.zeros(3))

    assert answered(Answers(recorder.read_log(), []), "train.py:3", 0, torch.zeros(4)) is None


def test_a_place_that_is_called_in_every_step_does_not_fill_the_log(recorder: Recorder) -> None:
    results = Results(recorder)
    for step in range(100):
        ended = results.begin_step(step)
        kept(results, "train.py:9", torch.tensor([float(step)]))

    assert len(list(recorder.read_log())) == SELDOM
    assert [step for step, _, _ in ended] == [98]


# Random states.


def draw() -> list[Any]:
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist(),
        torch.randn(3).tolist(), torch.randperm(5).tolist(),
    ]  # fmt: skip


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.integers(0, 700))
def test_random_numbers_go_on_as_they_would_have(seed: int, drawn: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.gauss(0, 1)
    np.random.randn(2 * drawn + 1)
    state = random_state.capture()
    expected = draw()
    draw()

    random_state.restore(state)

    assert draw() == expected


def test_to_capture_the_states_draws_nothing() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = draw()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)

    random_state.capture()

    assert draw() == expected


# Gradients, and randomness of the operating system.


@pytest.mark.parametrize(("zeroes", "expected"), [(True, False), (False, True)], ids=["zeroes them", "carries them on"])
def test_a_script_that_carries_gradients_over_a_step_is_noticed_once(zeroes: bool, expected: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    gradients.poison([optimizer])
    if zeroes:
        optimizer.zero_grad()

    weight.sum().backward()

    assert [gradients.are_carried_over(optimizer) for _ in range(2)] == [expected, False]
    assert not gradients.are_carried_over(torch.optim.SGD([weight], lr=0.1))


@pytest.mark.parametrize(("zeroes", "expected"), [(True, 0), (False, 1)], ids=["zeroes them", "carries them on"])
def test_a_backward_that_adds_to_gradients_of_the_replay_is_refused_before_they_are_reduced(
    zeroes: bool, expected: int
) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    refused: list[bool] = []
    gradients.poison([optimizer], lambda: refused.append(True))
    if zeroes:
        optimizer.zero_grad(set_to_none=False)

    for _ in range(2):
        weight.sum().backward()

    assert len(refused) == expected


def test_a_gradient_that_was_begun_anew_after_an_earlier_replay_is_still_one_of_this_replay() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    gradients.poison([optimizer])
    optimizer.zero_grad()
    weight.sum().backward()

    gradients.poison([optimizer])

    assert gradients.are_carried_over(optimizer)


def test_two_optimizers_of_one_parameter_both_learn_that_its_gradient_was_begun_anew() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD([weight], lr=0.1) for _ in range(2)]
    weight.sum().backward()
    gradients.poison(optimizers)
    optimizers[0].zero_grad()

    (weight.sum() * float("nan")).backward()

    assert [gradients.are_carried_over(one) for one in optimizers] == [False, False]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_the_gradient_of_a_view_is_watched_without_a_hook_which_may_crash_torch() -> None:
    """Megatron-core's distributed optimizer steps views of the model's weights, and gives them their gradients."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    part = weight.view(-1)[:2]
    part.grad = torch.ones(2)
    optimizer.param_groups[0]["params"] = [part]

    gradients.poison([optimizer])

    assert part._backward_hooks is None
    assert gradients.are_carried_over(optimizer)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_become_nan_in_the_step_itself_are_not_those_of_the_replay(set_to_none: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    gradients.poison([optimizer])
    optimizer.zero_grad(set_to_none=set_to_none)

    (weight.sum() * float("nan")).backward()

    assert not gradients.are_carried_over(optimizer)


def test_gradients_that_have_overflowed_do_not_look_like_those_of_the_replay() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    gradients.poison([optimizer])
    optimizer.found_inf = torch.ones(())  # as a GradScaler leaves it to an optimizer with fused=True
    at_overflow = gradients.are_carried_over(optimizer)
    del optimizer.found_inf

    assert (at_overflow, gradients.are_carried_over(optimizer)) == (False, True)


def drawn_from_the_system(applied: int) -> list[int]:
    """How often each call counts as randomness that cannot be replayed."""
    import secrets
    import tempfile
    import uuid

    ownership.add_user_directory(os.path.dirname(__file__))
    patch_table.apply_all(with_replay=False)
    session = make_session()
    session.applied = applied
    become(session)
    found = []
    for call in (
        lambda: os.urandom(4),
        uuid.uuid4,
        secrets.token_hex,
        random.SystemRandom().random,
        tempfile.mkdtemp,
        uuid.uuid1,
    ):
        call()
        found.append(origins.drawn_since_last_asked())
    return found


def test_randomness_of_the_operating_system_counts_in_steps_only() -> None:
    assert run_alone(drawn_from_the_system, 1) == [1, 1, 1, 1, 0, 0]
    assert run_alone(drawn_from_the_system, 0) == [0] * 6


# Output.


def say_in_turn(path: str, runs: list[list[str]], is_replay: bool) -> list[str]:
    """Print in each of several runs, one the other's replacement at boundary 1; returns what comes out of each.

    runs   of each, what it prints: "2>" goes to boundary 2, "!" goes to stderr, "&" is another thread's
    """
    session = make_session()
    become(session)
    files = []
    for number, words in enumerate(runs):
        fd = os.open(f"{path}-{number}", os.O_RDWR | os.O_CREAT)
        files.append(fd)
        sys.stdout = io.TextIOWrapper(os.fdopen(os.dup(fd), "wb", 0), "utf-8", newline="")
        sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(fd), "wb", 0), "utf-8", newline="")
        output.note_lines()
        session.board.set(0, Field.RECORDED, 1)
        if number:
            output.resume_from(session[Recorder], 1)
        if is_replay:
            session.mode = SimpleNamespace(is_live=False)  # type: ignore[assignment]
        for word in words:
            if word[1:] == ">":
                session.board.set(0, Field.RECORDED, int(word[0]))
            elif word[0] == "&":
                threads = [threading.Thread(target=print, args=(word[1:],), kwargs={"end": ""})]
                threads[0].start()
                threads[0].join()
            else:
                print(word.removeprefix("!"), end="", file=sys.stderr if word[0] == "!" else sys.stdout)
        output.end()
    return [os.pread(fd, 9999, 0).decode() for fd in files]


@pytest.mark.parametrize(
    ("lost", "says", "shown"),
    [
        ([], ["a\n", "b\n"], "a\nb\n"),
        (["a\n"], ["a\n", "b\n"], "b\n"),
        (["a\n", "!e\n"], ["a\n", "!e\n"], ""),
        (["a", "b\n"], ["a", "b\nc\n"], "c\n"),
        (["a\nb\n"], ["a\n", "b\n", "c\n"], "c\n"),
        (["é", "\r1%", "\r2%"], ["é", "\r1%", "\r2%", "\r3%\n"], "2%\r3%\n"),
        (["got SIGTERM\n", "soon\n"], ["a\n", "b\n"], "a\nb\n"),
        (["got SIGTERM\n", "a\n"], ["a\n", "b\n"], "b\n"),
        (["&alive\n", "a\n"], ["a\n", "&alive\n", "&alive\n"], "alive\n"),
        (["a", "&alive\n", "b\n"], ["a", "b\n", "c\n"], "c\n"),
        (["a\n"], ["!a\n", "a\n"], "a\n"),
        (["a\n", "a\n"], ["a\n", "a\n", "a\n"], "a\n"),
        (["a\n", "2>", "a\n", "b\n"], ["a\n", "c\n", "2>", "b\n", "a\n", "a\n"], "c\na\n"),
        (["x\n", "2>"], ["2>", "x\n"], "x\n"),
        (["a ", "2>", "b\n"], ["a ", "2>", "b\n", "c\n"], "c\n"),
        (["a\n"], ["b"], "b"),
        (["12:00:01,250 a\n"], ["12:00:07,125 a\n", "12:00:07,125 b\n"], "12:00:07,125 b\n"),
        (["loss 0.5\n"], ["loss 0.25\n"], "loss 0.25\n"),
    ],
)
def test_lines_that_the_lost_rank_has_printed_in_the_same_step_are_left_out_and_no_others(
    lost: list[str], says: list[str], shown: str, tmp_path: Any
) -> None:
    first, second, third = run_alone(say_in_turn, str(tmp_path / "out"), [lost, says, says], False)

    assert first == "".join(word.lstrip("!&") for word in lost if word[1:] != ">")
    assert second == shown
    assert third in ("", "b")  # what has begun is no line yet


def test_lines_of_a_replay_are_not_noted(tmp_path: Any) -> None:
    assert run_alone(say_in_turn, str(tmp_path / "out"), [["a\n"], ["a\n"]], True) == ["a\n", "a\n"]


def divert(run_dir: str) -> tuple[str, str]:
    """What a replay prints, on every level, and what comes out after it."""
    out = os.open(f"{run_dir}/out", os.O_RDWR | os.O_CREAT)
    for fd in (1, 2):
        os.dup2(out, fd)
    os.mkdir(f"{run_dir}/logs")
    session = make_session(run_dir=run_dir)
    become(session)
    diverted = output.Diverted(session)
    print("print")
    os.write(1, b"write\n")
    os.system("echo child")
    sys.stdout.flush()
    diverted.end()
    os.write(1, b"live\n")
    (log,) = os.listdir(f"{run_dir}/logs")
    with open(f"{run_dir}/logs/{log}") as replayed, open(f"{run_dir}/out") as real:
        return replayed.read(), real.read()


def test_what_a_replay_prints_goes_to_its_log_and_not_to_the_ranks(tmp_path: Any) -> None:
    replayed, real = run_alone(divert, str(tmp_path))

    assert sorted(replayed.split()) == ["child", "print", "write"]
    assert real == "live\n"


# A run of the script that an error has ended.


def test_variables_are_let_go_though_records_have_read_them_and_the_traceback_is_held() -> None:
    class Model:
        """Anything that can be referred to weakly."""

    kept: list[weakref.ref[Model]] = []

    def script() -> None:
        model, around = Model(), Model()
        kept.extend((weakref.ref(model), weakref.ref(around)))
        assert "model" in sys._getframe().f_locals  # as a boundary's record does: the frame keeps this copy

        def forward() -> None:
            raise RuntimeError(f"UCE ERROR {around}")

        forward()

    with pytest.raises(RuntimeError) as error:
        script()
    trace = error.value.__traceback__  # as whoever called sys.excepthook has it

    reset._clear_frames(error.value)

    assert trace is not None
    assert [found() for found in kept] == [None, None]
