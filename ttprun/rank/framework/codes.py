"""The numbers of MindIO's interface: enums and return codes. Standard library only."""

from __future__ import annotations

from enum import Enum

RET_OK = 0
RET_ERROR = 1
RET_NO_REBUILD = 2  # of a clean handler: the failed memory was unused, so no state needs to be sent


class Action(Enum):
    """What the main thread does after its wait."""

    RETRY = 0
    EXIT = 1


class OptimizerType(Enum):
    """Index of a group in the argument of tft_set_optimizer_replica."""

    ATTENTION = 0
    MOE = 1


class PauseType(Enum):
    """What tft_pause_train does at a pause."""

    PAUSE = 1
    RAISE = 2


class ReportState(Enum):
    """The state that a rank reports."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


def value_of(code: Enum | int) -> int:
    """The number of a code, given as an enum or a number."""
    return int(code.value) if isinstance(code, Enum) else int(code)
