"""What a scheduler calls. All return 0 if it was passed on to the agent, and 1 if it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttprun.mindio import framework
from ttprun.mindio.handlers import RET_ERROR


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """Have a function called: report_fault_ranks(ranks, codes), report_stop_complete(code, msg, ranks),
    report_strategies(ranks, strategies), report_result(code, msg, ranks, strategy). Ranks are {rank: kind of fault}.
    """
    return framework.register(action, func)


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """Ranks have failed ({rank: 0 memory of the device, 1 anything else}), or with "pause" all are to wait.

    timeout   seconds that a pause lasts at most; None: till "continue", or pause_timeout_s
    """
    if stop_type not in framework.STOPS:
        return RET_ERROR
    return framework.notify(stop_type, ranks=fault_ranks, timeout_s=timeout)


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    """The final list of all that have failed."""
    return framework.notify("stop", ranks=fault_ranks, timeout_s=None)


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """Say how to go on. "retry", "recover" and "migration" the agent decides by itself. "downgrade": replacements are
    not waited for, the others continue; "upgrade": ranks that have left so are called back. report_result tells what
    came of it; 1 for an unknown strategy.

    params   for the handlers of a downgrade or upgrade, in JSON
    """
    return framework.notify(strategy, params=params) if strategy in framework.STRATEGIES else RET_ERROR


def tft_notify_controller_prepare_action(action: str, fault_ranks: dict[int, int] | None = None) -> int:
    """ "hot switch": the processes of these ranks, which are healthy, are replaced by new ones once all ranks have
    finished the step; report_result reports the outcome. "stop switch": they are not, if it has not begun.
    """
    return framework.prepare(action, fault_ranks or {})


def tft_notify_controller_dump() -> int:
    """End the job, with a checkpoint."""
    return framework.notify("dump")
