"""Actions: orders to the agent that leads. Data only; each is carried out in the order in which it is given.

Those that the agent of one node carries out are in `ttprun.protocol.process_orders`, those for ranks in
`ttprun.protocol.to_rank`.

A message to a rank that has not said hello yet is held by the agent, and a newer one takes its place. A message for a
process that has ended is dropped.
"""

from __future__ import annotations

from ttprun.protocol.process_orders import Action
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import Incident


class NoteUnusable(Action, frozen=True):
    """Note beside a checkpoint that this script could not resume from it, so that no launch tries it again.

    place        its directory
    reason       why not
    is_refused   False: processes were lost on the way, which may go better the next time
    """

    place: str
    reason: str
    is_refused: bool


class Persist(Action, frozen=True):
    """Write a checkpoint of the boundary at which all survivors are quiesced; the answer is StatePersisted.

    ranks     survivors; each writes a part of what they all hold. None: what shared memory keeps of it is written
    cause     for the checkpoint's manifest
    """

    ranks: tuple[int, ...]
    generation: int
    boundary: int
    cause: str


class GiveUpCheckpoint(Action, frozen=True):
    """The requested checkpoint is not written, and the job continues: drop it, and report why.

    boundary   at which the ranks stand, 0 if that is not known
    reason     for who has asked
    """

    boundary: int
    reason: str


class SetDeadline(Action, frozen=True):
    """Post DeadlinePassed with this generation, name and rank after so many seconds; it need never be cancelled.

    rank   that is repaired alone, and whose own the generation is; None: it is the job's
    """

    generation: int
    name: str
    after_s: float
    rank: int | None = None


class RestartGroup(Action, frozen=True):
    """Fallback: end all ranks and start them anew, as torchrun does; the answer is GroupRestarted.

    Given again before that, it changes nothing.

    reason   for the operator
    """

    reason: Reason


class Regroup(Action, frozen=True):
    """End all ranks and start the group again on the nodes that are there then; the answer is GroupResized.

    place      of the checkpoint from which all resume; "": they run the script from its top
    boundary   of that
    reason     for the operator
    is_back    without the nodes that came last, which cannot take part
    """

    place: str
    boundary: int
    reason: Reason
    is_back: bool = False


class GiveUpResize(Action, frozen=True):
    """The group stays on its nodes for now.

    reason   why its state could not be saved, or not resumed from
    """

    reason: str


class FailJob(Action, frozen=True):
    """End all ranks; the job has failed.

    reason         for the operator
    has_progress   False if the same fault comes back again and again (exit code 93)
    """

    reason: Reason
    has_progress: bool = True


class FinishJob(Action, frozen=True):
    """All ranks have finished; the job is done."""


class RecordIncident(Action, frozen=True):
    """Write the incident to the event log: it was opened, changed its phase, or ended."""

    incident: Incident
