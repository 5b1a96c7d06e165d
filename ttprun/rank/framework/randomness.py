"""Random states of each step, kept in shared memory that outlives the process; MindIO does not restore them.

A survivor has drawn in the step that is run again, a replacement has drawn nothing: both get the states from before the
last update of the optimizer. Generators in a framework's own objects are not included.
"""

from __future__ import annotations

import msgpack

from ttprun.capture.records.recorder import Recorder
from ttprun.device import interface
from ttprun.introspect import random_state
from ttprun.rank.session import Session


def keep(session: Session, step: int) -> None:
    """Keep the states with which all resume after `step`."""
    device = interface.current()
    record = {"generators": random_state.capture(), "device": device.rng_state()}
    session[Recorder].write(step, msgpack.packb(record), [])


def restore(session: Session, step: int) -> bool:
    """Restore the states kept for `step`; False if there are none."""
    stored = session[Recorder].read(step)
    if stored is None:
        return False
    record = msgpack.unpackb(stored[0])
    random_state.restore(record["generators"])
    if record["device"]:  # empty if the process had not used its device yet
        interface.current().restore_rng_state(record["device"])
    return True
