"""The set-up of a replay, run before it is needed: up to the first loop that trains, and what is still unknown there.

Which boundary the replay is for shows only when the rank is lost; so this part of it goes on as long as nothing depends
on that, and then waits. When the boundary is known it is checked that nothing in the set-up would have been other:
else this process is of no use, and a replay from the top takes its place. Begin with `SetUp`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ttprun.capture.effects.effects import Effects
from ttprun.capture.position import loop_sites
from ttprun.capture.records.boundary_record import Record
from ttprun.capture.records.recorder import Recorder
from ttprun.groups.results import Answers
from ttprun.rank.replay.replay import ReplayRun
from ttprun.rank.session import Session

if TYPE_CHECKING:
    from ttprun.groups.entry import Entry


class SetUp(ReplayRun):
    """A replay of which only the set-up is run.

    sample   any record of the rank
    go_on    called where it waits; returns the replay that follows
    leave    called with the reason if this process is of no use; does not return
    """

    def __init__(
        self, session: Session, sample: Record, go_on: Callable[[], ReplayRun], leave: Callable[[str], NoReturn]
    ) -> None:
        answers = Answers(session[Recorder].read_log(), [])
        super().__init__(session, (0, 0), sample, sample, answers)
        self._go_on = go_on
        self._leave = leave
        self._asked: list[str] = []  # places of collectives
        self._made: set[str] = set()  # places of loaders of which iterators were made

    @property
    def newest_step(self) -> int:
        """As in ReplayRun: nothing of a step is known yet."""
        return 0

    def refuse(self, reason: str, is_contradiction: bool = True) -> NoReturn:
        """As in ReplayRun."""
        self._leave(reason)

    def answer(self, entry: Entry) -> None:
        """As in ReplayRun."""
        if entry.place:
            self._asked.append(entry.place)
        super().answer(entry)

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        """As in ReplayRun."""
        if name[0] in _loaders_of(self.target):
            return self._go_on().iterator_to_make(loader, name)
        self._made.add(name[0])
        return None

    def before_step(self, frame: FrameType, returned: Any = None, optimizer: Any = None) -> Any:
        """As in ReplayRun."""
        return self._go_on().before_step(frame, returned, optimizer)

    def enter(self, site: loop_sites.Site, frame: FrameType) -> Any:
        """As in ReplayRun."""
        return self._go_on().enter(site, frame) if site.key in self.jumps.sites else super().enter(site, frame)

    def end(self, replay: ReplayRun) -> str:
        """The replay that follows is known; returns why it cannot begin with this set-up, "" if it can."""
        before = replay.before
        if before is None:
            return "the replay begins at the first boundary"
        if self.jumps.entered.keys() & replay.jumps.sites:
            return "a loop of the set-up trains by now"
        if self._made & _loaders_of(before):
            return "a loader of the set-up is trained with by now"
        if any(replay._answers.has_newer(place, replay.newest_step) for place in self._asked):
            return "a collective of the set-up was issued again since"
        if why_not := Effects.why_set_up_again(replay.newest_step):
            return why_not
        for place in self._asked:
            replay._answers.pass_over(place)
        return ""

    def end_output(self) -> None:
        """What follows has a log of its own."""
        self.output.end(0, 0)


def _loaders_of(record: Record) -> set[str]:
    return {iterator["name"][0] for iterator in record.fields.loaders}
