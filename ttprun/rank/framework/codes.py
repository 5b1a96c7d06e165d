"""The values of MindIO's interface: its enums and return codes, limits of its arguments, and what errors mean."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from ttprun.device.device_errors import UpdateTimes, error_time_us

# The numbers of MindIO's interface: enums and return codes. Standard library only.

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


# MindIO's limits for arguments. Standard library only.

MOST_RANKS = 100_000
PORTS = range(1024, 65536)


def check_rank(who: str, rank: int, world_size: int) -> None:
    """Raise ValueError unless the rank is in the world, and the world is not too large.

    who          MindIO's function, for the message
    rank         0 to world_size - 1
    world_size   1 to MOST_RANKS
    """
    if not 0 < world_size <= MOST_RANKS:
        raise ValueError(f"{who}: world_size is {world_size}; give 1 to {MOST_RANKS}")
    if not 0 <= rank < world_size:
        raise ValueError(f"{who}: rank is {rank}; give 0 to {world_size - 1}")


def check_port(who: str, port: int) -> None:
    """Raise ValueError for privileged or impossible ports."""
    if port not in PORTS:
        raise ValueError(f"{who}: port is {port}; give {PORTS.start} to {PORTS.stop - 1}")


# The meaning of the train function's errors: one table of substrings, in MindIO's order.
#
# Each is searched for in `str(error)` of a RuntimeError; the first found wins. A framework may add rows. Read
# `ErrorTable.classify` first.

FORCE_STOP = "FORCE STOP"
ARF_FINISH = "ARF FINISH"
STEP_FINISH = "STEP FINISH"
OTHER = "OTHER"
REPAIRABLE, CORRUPTED = "HBM MULTI BIT ECC can repair", "HBM MULTI BIT ECC can't repair"


class ErrorTable:
    """The rows: substring -> function from the message to a kind; and kind -> state to report.

    is_retried   device errors are repaired in the same process; else they are like any other error
    """

    def __init__(self, times: UpdateTimes) -> None:
        self.is_retried = True
        self._times = times
        self.kinds: dict[str, Callable[[str], str]] = {
            "UCE ERROR": lambda text: self._if_retried("UCE ERROR"),
            "HBM MULTI BIT ECC": self._of_hbm_error,
            FORCE_STOP: lambda text: FORCE_STOP,
            ARF_FINISH: lambda text: ARF_FINISH,
            STEP_FINISH: lambda text: STEP_FINISH,
            "HCCL OP RETRY FAILED": lambda text: self._if_retried("HCCL OP RETRY FAILED"),
            "SUSPECT REMOTE ERROR": lambda text: self._if_retried("SUSPECT REMOTE ERROR"),
            "UB LINK ERROR": lambda text: self._if_retried("UB LINK ERROR"),
            "HCCS LINK ERROR": lambda text: self._if_retried("HCCS LINK ERROR"),
        }
        self.states: dict[str, str] = {
            FORCE_STOP: "RS_NORMAL",
            "UCE ERROR": "RS_UCE",
            REPAIRABLE: "RS_UCE",
            CORRUPTED: "RS_UCE_CORRUPTED",
            ARF_FINISH: "RS_PREREPAIR_FINISH",
            STEP_FINISH: "RS_STEP_FINISH",
            "HCCL OP RETRY FAILED": "RS_HCCL_FAILED",
            "SUSPECT REMOTE ERROR": "RS_HCCL_FAILED",
            "UB LINK ERROR": "RS_HCCL_FAILED",
            "HCCS LINK ERROR": "RS_HCCL_FAILED",
            OTHER: "RS_UNKNOWN",
        }

    def add(self, pattern: str, state: str, kind_of: Callable[[str], str]) -> None:
        """Append a row.

        state     name of a ReportState, for the kind of the same name as the pattern
        kind_of   given the message; returns a kind

        Raises ValueError if there is no such state.
        """
        if state not in ReportState.__members__:
            raise ValueError(f"'{state}' is not a state to report; use one of {', '.join(ReportState.__members__)}")
        self.states[pattern] = state
        self.kinds[pattern] = kind_of

    def classify(self, error: BaseException) -> ReportState:
        """The state to report for an error; RS_UNKNOWN if it is not in the table."""
        if not isinstance(error, RuntimeError):
            return ReportState.RS_UNKNOWN
        text = str(error)
        kind = next((kind_of(text) for pattern, kind_of in self.kinds.items() if pattern in text), OTHER)
        return ReportState[self.states.get(kind, "RS_UNKNOWN")]

    def _if_retried(self, kind: str) -> str:
        return kind if self.is_retried else OTHER

    def _of_hbm_error(self, text: str) -> str:
        if not self.is_retried:
            return OTHER
        return REPAIRABLE if self._times.can_repair(error_time_us(text)) else CORRUPTED
