"""The effects of one run of the script, as far as the next process repeats or skips them. Begin with `Effects`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import msgpack

from ttprun.capture.data import workers
from ttprun.capture.effects import file_answers, origins, output, script_files
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect import random_state

# What is kept in the recorder's log stands beside the results of collectives (groups/results.py); in the place of their
# step it has one of these.
_ORIGIN = -1  # the times, pids and entropy that the set-up has drawn (origins.py)
_FILE = -2  # what the file system has answered (file_answers.py)
_RANDOM = "random states"  # of this process when the run begins; a script without seeds draws from these


class Effects:
    """What a run draws, is answered and writes, kept in a recorder that outlives its process.

    end_set_up        the script has reached its first step: what it draws is not kept from here on
    why_not_noted   why lines would be lost or printed twice if this process were replaced; "" if they would not
    close_files       the run is over: nothing of it may be written later
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begin(self, is_replay: bool, answered: Iterable[bytes] | None = None) -> None:
        """A run of the script begins, or has just imported torch; the host is this process's own.

        is_replay   of the run that the recorder is of: what it draws is kept already
        answered    log of what the file system has answered the run before; None: the recorder's
        """
        workers.keep_in(self._recorder)
        self._begin_origins(is_replay)
        answers = _kept_in(self._recorder.read_log() if answered is None else answered, _FILE)
        file_answers.begin(answers, partial(self._keep, _FILE))

    def _begin_origins(self, is_replay: bool) -> None:
        """Give a replacement's setup the times, pids and entropy that the lost rank's had, and record what is new."""
        draws = self.drawn()
        keep = partial(self._keep, _ORIGIN)
        origins.begin(draws, None if is_replay else keep)
        states = next((value for place, value in draws if place == _RANDOM), None)
        if states is not None:
            random_state.restore(states)
        elif not is_replay:
            keep((_RANDOM, random_state.capture()))

    def drawn(self) -> list[tuple[str, Any]]:
        """(place, value) of all that set-ups have drawn, oldest first."""
        return _kept_in(self._recorder.read_log(), _ORIGIN)

    def keep_origin(self, place: str, value: Any) -> None:
        """Keep a value for the set-ups that follow."""
        self._keep(_ORIGIN, (place, value))

    def _keep(self, kind: int, answer: tuple[Any, Any]) -> int:
        """Keep (place, what was given there) for the next process; returns the size."""
        packed: bytes = msgpack.packb((kind, *answer))
        self._recorder.append_log(packed)
        return len(packed)

    def resume_at(self, boundary: int) -> None:
        """The run goes on at a boundary: what the lost process has written since is not written again."""
        output.resume_from(self._recorder, boundary)
        script_files.resume_appends(self._recorder, boundary)

    end_set_up = staticmethod(origins.end)
    why_not_noted = staticmethod(output.why_not_noted)
    close_files = staticmethod(script_files.forget)


def _kept_in(log: Iterable[bytes], kind: int) -> list[tuple[Any, Any]]:
    """(place, what was given there) of one kind, oldest first."""
    return [(place, value) for step, place, value in map(msgpack.unpackb, log) if step == kind]
