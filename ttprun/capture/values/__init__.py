"""The values in a script's variables: recorded at a boundary, and restored in a replacement.

snapshot.py walks over the variables, restore.py writes them back, records/nodes.py is the form between the two;
kinds.py is the table of how each kind of value is treated, and the other files treat one kind each. trees.py compares
records. The rule of all: a value that is neither restored, nor reproduced by the replay and compared, is refused with
the variable's name.
"""

from ttprun.capture.records.packing import pack, unpack_named
from ttprun.capture.values import data_trees, kinds, large, named, not_proved, turns, unchanged
from ttprun.capture.values.histories import is_awaited
from ttprun.capture.values.large import fingerprint
from ttprun.capture.values.named import names_of as names_not_proved
from ttprun.capture.values.not_proved import leave_dearest
from ttprun.capture.values.refusals import MARK_OF_REFUSED, refusals
from ttprun.capture.values.restore import Restore
from ttprun.capture.values.snapshot import FIXED, LEFT, Snapshot, room_to_walk
from ttprun.capture.values.suspended import restore_loop
from ttprun.capture.values.trees import Tree
from ttprun.capture.values.type_names import CannotRestoreError
from ttprun.capture.values.unrecorded import UnrecordedTensorError
from ttprun.introspect import futures

__all__ = [
    "FIXED", "MARK_OF_REFUSED", "CannotRestoreError", "Restore", "Snapshot", "Tree", "UnrecordedTensorError",
    "begin_boundary", "fingerprint", "forget", "is_awaited", "kinds", "leave_dearest",
    "let_go", "names_not_proved", "pack", "refusals", "restore_loop", "room_to_walk", "saves", "unpack_named",
]  # fmt: skip


def begin_boundary() -> None:
    """Begin a record: forget what was remembered about values that were not met at the previous boundary."""
    unchanged.begin_boundary()
    data_trees.begin_boundary()
    turns.Clock.records += 1


def let_go() -> None:
    """Keep nothing alive that the script has dropped."""
    unchanged.begin_boundary()
    unchanged.begin_boundary()
    data_trees.begin_boundary()


def forget() -> None:
    """The run of the script is over: forget its values."""
    unchanged.forget()
    data_trees.forget()
    large.forget()
    named.forget()
    LEFT.clear()
    not_proved.taken_ms.clear()
    futures.forget()
