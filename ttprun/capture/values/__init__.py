"""The values in a script's variables: recorded at a boundary, and restored in a replacement.

snapshot.py walks over the variables, restore.py writes them back, records/nodes.py is the form between the two;
kinds.py is the table of how each kind of value is treated, and most other files treat one kind each. What has not
changed needs no copy: kept.py (by names), changes.py (how it is seen), large.py (tensors and arrays), data_trees.py and
long_items.py (datasets, long lists). trees.py compares records. The rule of all: a value that is neither restored, nor
reproduced by the replay and compared, is refused with the variable's name.
"""

from ttprun.capture.records.packing import CannotRestoreError, pack, unpack_named
from ttprun.capture.values import changes, data_trees, gaps, kinds, large
from ttprun.capture.values.autograd_graphs import UnrecordedTensorError, is_awaited
from ttprun.capture.values.gaps import MARK_OF_REFUSED, leave_dearest, refusals
from ttprun.capture.values.gaps import names_of as names_not_proved
from ttprun.capture.values.iterators import restore_loop
from ttprun.capture.values.large import fingerprint
from ttprun.capture.values.restore import Restore
from ttprun.capture.values.snapshot import FIXED, LEFT, Snapshot, room_to_walk
from ttprun.capture.values.trees import Tree
from ttprun.introspect.safe_reads import forget_futures

__all__ = [
    "FIXED", "MARK_OF_REFUSED", "CannotRestoreError", "Restore", "Snapshot", "Tree", "UnrecordedTensorError",
    "begin_boundary", "fingerprint", "forget", "is_awaited", "kinds", "leave_dearest",
    "let_go", "names_not_proved", "pack", "refusals", "restore_loop", "room_to_walk", "saves", "unpack_named",
]  # fmt: skip


def begin_boundary() -> None:
    """Begin a record: forget what was remembered about values that were not met at the previous boundary."""
    changes.begin_boundary()
    data_trees.begin_boundary()
    changes.Clock.records += 1


def let_go() -> None:
    """Keep nothing alive that the script has dropped."""
    changes.begin_boundary()
    changes.begin_boundary()
    data_trees.begin_boundary()


def forget() -> None:
    """The run of the script is over: forget its values."""
    changes.forget()
    data_trees.forget()
    large.forget()
    gaps.forget()
    LEFT.clear()
    gaps.taken_ms.clear()
    forget_futures()
