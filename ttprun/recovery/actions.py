"""Actions: orders to the agent. Data only; each is carried out in the order in which it is given.

A message to a rank that has not said hello yet is held by the agent, and a newer one takes its place. A message for a
process that has ended is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttprun.recovery.incident import Incident


@dataclass(frozen=True, slots=True)
class Action:
    """An order."""


@dataclass(frozen=True, slots=True)
class Freeze(Action):
    """Have the survivors quiesce and answer with RankFrozen; those already quiesced answer again.

    ranks        survivors
    generation   that is being made
    lost         ranks that are being replaced
    """

    ranks: tuple[int, ...]
    generation: int
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpawnRank(Action):
    """Give a lost rank a process, from the standbys if there is one; the answer is RankStarted, or SpawnFailed.

    generation   in which it was asked for; if ranks are lost meanwhile, Replay or Resume names a newer one
    """

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class Replay(Action):
    """Order a replacement to run the script in replay up to the boundary; the answer is RankReplayed.

    source   survivor that will send the state; the rank itself: it will come from its mirror; None: from the snapshot
             of that boundary
    """

    rank: int
    generation: int
    boundary: int
    source: int | None


@dataclass(frozen=True, slots=True)
class SendState(Action):
    """Order a survivor to send its state; it answers StateSent once, each replacement RankRepaired.

    to   the replacements, all of which wait at `boundary`
    """

    source: int
    to: tuple[int, ...]
    generation: int
    boundary: int


@dataclass(frozen=True, slots=True)
class LoadMirror(Action):
    """Order a replacement to load what its rank had mirrored; it answers RankRepaired."""

    rank: int
    generation: int
    boundary: int


@dataclass(frozen=True, slots=True)
class Rewind(Action):
    """Put stored records in the place of the ranks' own; all their processes have been ended before.

    ranks      all ranks of the job, or the one that goes back alone
    boundary   of the snapshot or checkpoint; 0: the ranks begin anew, and have no past
    place      directory of the checkpoint; "": the snapshot in shared memory, or none
    """

    ranks: tuple[int, ...]
    boundary: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class NoteUnusable(Action):
    """Note beside a checkpoint that this script could not resume from it, so that no launch tries it again.

    place        its directory
    reason       why not
    is_refused   False: processes were lost on the way, which may go better the next time
    """

    place: str
    reason: str
    is_refused: bool


@dataclass(frozen=True, slots=True)
class LoadState(Action):
    """Order ranks to load the state of a snapshot; each answers RankRepaired.

    ranks      all of which wait at `boundary`
    """

    ranks: tuple[int, ...]
    generation: int
    boundary: int


@dataclass(frozen=True, slots=True)
class Persist(Action):
    """Write a checkpoint of the boundary at which all survivors are quiesced; the answer is StatePersisted.

    ranks     survivors; each writes a part of what they all hold
    cause     for the checkpoint's manifest
    """

    ranks: tuple[int, ...]
    generation: int
    boundary: int
    cause: str


@dataclass(frozen=True, slots=True)
class GiveUpCheckpoint(Action):
    """The requested checkpoint is not written, and the job continues: drop it, and report why.

    boundary   at which the ranks stand, 0 if that is not known
    reason     for who has asked
    """

    boundary: int
    reason: str


@dataclass(frozen=True, slots=True)
class Resume(Action):
    """Order all ranks to connect and to issue their journals; each answers RankRebuilt, then RankReissued.

    ranks      survivors and replacements
    boundary   at which all stand; 0: replacements run the script live from the top
    """

    ranks: tuple[int, ...]
    generation: int
    boundary: int


@dataclass(frozen=True, slots=True)
class SetDeadline(Action):
    """Post DeadlinePassed with this generation, name and rank after so many seconds; it need never be cancelled.

    rank   that is repaired alone, and whose own the generation is; None: it is the job's
    """

    generation: int
    name: str
    after_s: float
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class KillRank(Action):
    """End the rank's process and its children at once. Its exit is expected and will be dropped."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RestartGroup(Action):
    """Fallback: end all ranks and start them anew, as torchrun does; the answer is GroupRestarted.

    reason   for the operator
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Regroup(Action):
    """End all ranks and start the group again on the nodes that are there then; the answer is GroupResized.

    place      of the checkpoint from which all resume; "": they run the script from its top
    boundary   of that
    reason     for the operator
    is_back    without the nodes that came last, which cannot take part
    """

    place: str
    boundary: int
    reason: str
    is_back: bool = False


@dataclass(frozen=True, slots=True)
class GiveUpResize(Action):
    """The group stays on its nodes for now.

    reason   why its state could not be saved, or not resumed from
    """

    reason: str


@dataclass(frozen=True, slots=True)
class FailJob(Action):
    """End all ranks; the job has failed.

    reason         for the operator
    has_progress   False if the same fault comes back again and again (exit code 93)
    """

    reason: str
    has_progress: bool = True


@dataclass(frozen=True, slots=True)
class FinishJob(Action):
    """All ranks have finished; the job is done."""


@dataclass(frozen=True, slots=True)
class RecordIncident(Action):
    """Write the incident to the event log: it was opened, changed its phase, or ended."""

    incident: Incident
