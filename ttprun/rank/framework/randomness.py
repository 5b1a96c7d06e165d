"""Random states of each step, kept in memory that outlives the process: MindIO leaves them to chance.

A survivor has drawn in the step that is run again, and a replacement has drawn nothing: both go back to what stood when
the last update of the optimizer began. Generators that a framework keeps in objects of its own are not known here.
"""

from __future__ import annotations

import msgpack

from ttprun.device import registry
from ttprun.rank.process import random_state
from ttprun.rank.session import Session


def keep(session: Session, step: int) -> None:
    """Keep the states from which all go on behind `step`."""
    device = registry.current()
    record = {"generators": random_state.capture(), "device": device.rng_state()}
    session.recorder.write(step, msgpack.packb(record), [])


def restore(session: Session, step: int) -> bool:
    """Put back what was kept; False if nothing was."""
    found = session.recorder.read(step)
    if found is None:
        return False
    record = msgpack.unpackb(found[0])
    random_state.restore(record["generators"])
    if record["device"]:  # of none, if the process has come to its device only since
        registry.current().restore_rng_state(record["device"])
    return True
