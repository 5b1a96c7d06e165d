"""The decorated train function: how it is left, and how it is entered again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from mindio_ttp.framework_ttp import (
    Action,
    tft_end_updating_os,
    tft_exception_handler,
    tft_get_reboot_type,
    tft_get_repair_step,
    tft_get_repair_type,
    tft_is_reboot_node,
    tft_pause_train,
    tft_register_clean_handler,
    tft_register_rollback_handler,
    tft_register_stop_handler,
    tft_register_stream_sync_handler,
    tft_start_updating_os,
    tft_wait_next_action,
)

from tests.device.fake_npu import FakeNpu
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.mindio import handlers
from ttprun.mindio.callback_recovery import CallbackRecovery
from ttprun.mindio.framework import Framework, MainThread
from ttprun.mindio.handlers import CallbackFailedError
from ttprun.protocol import from_rank, mindio, to_rank
from ttprun.protocol.board import Field
from ttprun.rank.bootstrap.hooks import wrap_process_group_name


def recover(session: Rank, step: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """The recovery thread's part, as the agent orders it: once the train function is left, release it at a step."""
    framework = session.framework
    assert framework is not None

    def work() -> None:
        framework.wait_until_stopped(lambda: None)
        framework.note_cleaned()
        meanwhile()
        framework.release(step)

    threading.Thread(target=work, daemon=True).start()


def test_the_train_function_is_entered_again_with_the_same_arguments(session: Rank, framework: Framework) -> None:
    seen: list[tuple[Any, ...]] = []
    model = object()

    @tft_exception_handler
    def train(model: object, step: list[int], *, name: str) -> str:
        seen.append((model, step[0], name))
        if step[0] == 0:
            framework.order_stop("retry")
            recover(session, 7, lambda: framework.handlers.args[1].__setitem__(0, 7))
            tft_start_updating_os()
        return "done"

    result = train(model, [0], name="x")

    assert result == "done"
    assert seen == [(model, 0, "x"), (model, 7, "x")]
    assert (session.applied, tft_get_repair_step(), tft_get_repair_type()) == (7, 7, "retry")


def test_what_a_callback_puts_in_the_place_of_an_argument_is_what_the_function_gets(
    session: Rank, framework: Framework
) -> None:
    seen = []

    @tft_exception_handler
    def train(model: str) -> None:
        seen.append(model)
        if model == "old":
            framework.order_stop("retry")
            recover(session, 3, lambda: framework.handlers.args.__setitem__(0, "new"))
            tft_start_updating_os()

    train("old")

    assert seen == ["old", "new"]


def test_an_update_is_not_begun_once_a_recovery_has(session: Rank, framework: Framework) -> None:
    framework.place = MainThread.TRAINING
    framework.order_stop("recover")

    with pytest.raises(RuntimeError, match=r"^FORCE STOP"):
        tft_start_updating_os()


def test_an_update_makes_the_next_step(session: Rank) -> None:
    tft_start_updating_os()
    is_torn_inside = session.framework is not None and session.framework.is_torn
    tft_end_updating_os(1)

    assert is_torn_inside
    assert session.framework is not None
    assert not session.framework.is_torn
    assert (session.applied, session.board.get(0, Field.APPLIED), session.board.get(0, Field.RECORDED)) == (1, 1, 1)


def test_a_step_that_is_behind_the_last_one_is_refused(session: Rank) -> None:
    tft_start_updating_os()
    tft_end_updating_os(5)

    with pytest.raises(ValueError, match="step 5 is not after step 5"):
        tft_end_updating_os(5)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("UCE ERROR"), KeyboardInterrupt()])
def test_any_other_error_ends_the_train_function(session: Rank, error: BaseException) -> None:
    @tft_exception_handler
    def train() -> None:
        raise error

    with pytest.raises(type(error)):
        train()


def test_failed_memory_is_reported_and_waited_out(session: Rank, framework: Framework) -> None:
    calls = []
    session.applied = 4

    @tft_exception_handler
    def train() -> None:
        calls.append(framework.fault.name)
        if len(calls) == 1:
            recover(session, 4)
            raise RuntimeError("UCE ERROR, error code is 507053")

    train()

    reports = [message for message in session.channel.sent if isinstance(message, from_rank.RankFaulted)]  # type: ignore[attr-defined]
    assert [report.device_fault for report in reports] == ["memory-persistent"]
    assert calls == ["RS_NORMAL", "RS_NORMAL"]


def test_a_replacement_knows_that_it_is_one_and_does_not_train_before_its_repair(session: Rank) -> None:
    session.framework = Framework(session, joins_at=9, reboot_type="hot switch")
    session.framework.place = MainThread.TRAINING

    assert tft_is_reboot_node()
    assert tft_get_reboot_type() == "hot switch"
    with pytest.raises(RuntimeError, match=r"^ARF FINISH"):
        tft_start_updating_os()


def test_all_wait_behind_the_step_that_the_first_rank_was_about_to_make(session: Rank, framework: Framework) -> None:
    framework.place = MainThread.TRAINING
    tft_start_updating_os()
    session.board.set(0, Field.PAUSE_ASKED, 7)  # too late for step 1
    tft_end_updating_os(1)
    tft_pause_train(1)
    tft_start_updating_os()
    tft_end_updating_os(2)
    framework.order_stop("recover")

    with pytest.raises(RuntimeError, match=r"^STEP FINISH"):
        tft_pause_train(2)
    assert session.board.get(0, Field.PAUSE_AT) == 2
    assert session.channel.sent[-1] == mindio.Paused(7)  # type: ignore[attr-defined]


def test_a_pause_ends_when_the_agent_says_so_and_does_not_come_back(session: Rank, framework: Framework) -> None:
    synced: list[int] = []
    tft_register_stream_sync_handler(lambda: (synced.append(1), session.board.set(0, Field.PAUSE_ASKED, 0)))
    session.board.set(0, Field.PAUSE_ASKED, 1)
    tft_start_updating_os()
    tft_end_updating_os(1)

    tft_pause_train(1)
    tft_start_updating_os()
    tft_end_updating_os(2)
    tft_pause_train(2)

    assert synced == [1]


def test_a_rank_that_is_not_the_first_does_not_say_where_to_wait(session: Rank) -> None:
    session.local_rank = 1
    session.board.set(0, Field.RECORDED, 1)
    session.board.set(0, Field.PAUSE_ASKED, 1)

    tft_start_updating_os()

    assert session.board.get(0, Field.PAUSE_AT) == 0


def test_waiting_for_what_comes_next_says_whether_to_go_on(session: Rank, framework: Framework) -> None:
    framework.order_stop("recover")
    framework.note_cleaned()
    first = tft_wait_next_action()
    framework.order_stop("dump")
    framework.note_cleaned()

    assert (first, tft_wait_next_action()) == (Action.RETRY.value, Action.EXIT.value)


def test_random_states_go_back_to_those_of_the_step(session: Rank) -> None:
    torch.manual_seed(3)
    handlers.keep(session, 5)
    expected = torch.rand(4)
    torch.rand(100)

    was_kept = handlers.restore(session, 5)

    assert was_kept
    assert torch.equal(torch.rand(4), expected)
    assert not handlers.restore(session, 6)


def test_a_group_that_is_made_in_a_repair_has_the_same_name_however_many_a_rank_has_made(
    session: Rank, framework: Framework
) -> None:
    made = iter(range(100))
    names = [wrap_process_group_name(lambda ranks, use_hashed_name: str(next(made))) for _ in range(2)]
    setup = [names[0]([0, 1], False), names[0]([0, 1], True), names[1]([0, 1], False)]
    framework.is_past_setup = True
    session.generation = 3

    one, other = ([name([0, 1], True), name([0, 1], False), name([0, 1], True)] for name in names)

    assert setup == ["0", "1", "2"]
    assert one == other
    assert len(set(one)) == 3


# Callbacks and what stands for them.


def test_callbacks_get_the_arguments_and_their_context(session: Rank, framework: Framework) -> None:
    calls: list[Any] = []
    framework.handlers.args = ["model"]
    tft_register_stop_handler(lambda args, ctx: calls.append(("stop", args, ctx)), "a")
    tft_register_clean_handler(lambda is_uce, args, ctx: calls.append(("clean", is_uce, args, ctx)) or 2, "b")
    tft_register_rollback_handler(lambda step, args, ctx: calls.append(("rollback", step, args, ctx)), "c")

    framework.handlers.stop()
    code = framework.handlers.clean(True)
    framework.handlers.rollback(8)

    assert code == 2
    assert calls == [("stop", ["model"], "a"), ("clean", True, ["model"], "b"), ("rollback", 8, ["model"], "c")]


@pytest.mark.parametrize("code", [1, None, "ok"])
def test_a_clean_handler_that_does_not_say_that_it_has_cleaned_has_failed(
    session: Rank, framework: Framework, code: Any
) -> None:
    tft_register_clean_handler(lambda is_uce, args, ctx: code)

    with pytest.raises(CallbackFailedError, match="the clean handler returned"):
        framework.handlers.clean(False)


@pytest.mark.parametrize(("is_held", "code"), [(True, 0), (False, 2)])
def test_without_a_clean_handler_the_device_is_asked(
    session: Rank, framework: Framework, monkeypatch: pytest.MonkeyPatch, is_held: bool, code: int
) -> None:
    device = FakeNpu()
    device.install(monkeypatch)
    tensor = torch.zeros(4)
    device.module.npu.fail_memory(tensor if is_held else torch.zeros(4))

    framework.handlers.stop()
    found = framework.handlers.clean(True)

    assert found == code


def test_memory_outside_of_the_pool_cannot_be_cleaned(
    session: Rank, framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeNpu()
    device.install(monkeypatch)
    device.module.npu.fail_memory_of_library()

    with pytest.raises(CallbackFailedError):
        framework.handlers.clean(True)


def test_a_rank_that_is_not_in_its_train_function_cannot_be_repaired(session: Rank, framework: Framework) -> None:
    recovery = CallbackRecovery(session, framework)

    with pytest.raises(NotRepairableError, match="it is not in the function that tft_exception_handler decorates"):
        recovery._freeze(to_rank.Freeze((0,), 0, lost=(), repair_type="recover"))


def test_what_is_kept_of_a_step_can_be_read_without_running_code(session: Rank) -> None:
    handlers.keep(session, 2)

    found = session[Recorder].read(2)

    assert found is not None
    assert {"python", "torch"} <= set(msgpack.unpackb(found[0]))
