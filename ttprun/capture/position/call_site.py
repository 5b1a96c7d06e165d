"""The script's place when it steps an optimizer: the user's frames, and the loops around the step.

Most of that follows from the instructions on the call stack: whose code they are, and the loops around them. A training
loop reaches its step by the same instructions each time, so this is computed once for each such stack. Begin with
`look`.
"""

from __future__ import annotations

from types import CodeType, FrameType

from ttprun.capture.position import ast_transform, control_flow, gathering, library_loops, liveness, loop_sites, loops
from ttprun.introspect.frames import place, variables_of
from ttprun.introspect.whose import is_script_code

_MOST_WAYS = 1000


class _OfUser:
    """One of the user's frames on a stack.

    index       on the stack, the innermost frame being the first
    is_called_again   a loop of foreign code calls it, perhaps once for each training
    loops       the sites of the `for` statements around its instruction
    gathering   what collects results there outside of variables; "" if nothing does
    dead        names of its variables that are dead
    """

    __slots__ = ("dead", "gathering", "index", "is_called_again", "loops", "place")

    def __init__(self, index: int, frame: FrameType, outer: FrameType | None) -> None:
        self.index = index
        self.loops = loops.around(frame)
        self.is_called_again = (
            outer is not None
            and bool(self.loops)
            and library_loops.is_called_in_a_loop(frame, outer)
            and not control_flow.is_within_another(frame.f_code, self.loops[0].key)
        )
        self.gathering = gathering.look(frame, outer)
        self.dead = sorted(liveness.dead_in(frame))
        self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Way:
    """What follows from the instructions on a stack.

    codes         of all frames; held here, since a stack is identified by their ids
    place         as in a record
    frames        the user's, outermost first
    foreign       why foreign code prevents a replay: see library_loops.py
    is_compiled   all of the user's files were compiled with their loops followed
    whose         a remark on the first that was not
    whiles        the keys of the `while` loops around the step, outermost first
    """

    __slots__ = ("codes", "foreign", "frames", "is_compiled", "place", "whiles", "whose")

    def __init__(self, stack: list[FrameType]) -> None:
        self.codes: list[CodeType] = [frame.f_code for frame in stack]
        indexes = [index for index, frame in enumerate(stack) if is_script_code(frame.f_code.co_filename)]
        indexes.reverse()
        self.frames: list[_OfUser] = []
        outer: FrameType | None = None
        for index in indexes:
            self.frames.append(_OfUser(index, stack[index], outer))
            outer = stack[index]
        self.place = place([stack[index] for index in indexes])
        self.whiles = [site.key for index in indexes for site in loops.around(stack[index], is_while=True)]
        self.foreign = library_loops.why_not(stack[0])
        others = [name for index in indexes if (name := stack[index].f_code.co_filename) not in ast_transform.followed]
        self.is_compiled = not others
        self.whose = (
            f" (ttprun did not see {others[0]} being imported: runpy, exec, or an import before the script)"
            if others
            else ""
        )


_ways: dict[tuple[int, ...], _Way] = {}


class Whereabouts:
    """The script's place at this moment.

    place        [file, function, line] of each of the user's frames, outermost first, as another process can compare it
    codes        of these frames
    scopes       their variables, without what is dead and in no other place
    dead         the names of the dead ones among these
    active       of each of these frames, its active followed loops, outermost first
    unfollowed   active `for` statements that are not followed
    why_not      why a replacement cannot come here by itself; "" if it can
    whiles       the keys of the `while` loops around the step, outermost first
    """

    __slots__ = ("active", "codes", "dead", "place", "scopes", "unfollowed", "whiles", "why_not")

    def __init__(self, way: _Way, stack: list[FrameType]) -> None:
        self.place, self.whiles = way.place, way.whiles
        self.codes = [way.codes[of_user.index] for of_user in way.frames]
        self.scopes = [liveness.state_in(variables_of(stack[of_user.index]), of_user.dead) for of_user in way.frames]
        self.dead = [of_user.dead for of_user in way.frames]
        self.active: list[list[loops.Loop]] = []
        self.unfollowed: list[loop_sites.Site] = []
        gathers = ""
        for of_user in way.frames:
            active = loops.of_frame(stack[of_user.index])
            if of_user.is_called_again and active and not any(self.active):
                active[0].earlier = active[0].site.begun - 1
            self.active.append(active)
            if len(active) < len(of_user.loops):
                followed = [loop.site for loop in active]
                self.unfollowed += [site for site in of_user.loops if site not in followed]
            if of_user.gathering:
                gathers = f"{of_user.gathering} ({of_user.place})"
        self.why_not = way.foreign
        if self.why_not:
            return
        if self.unfollowed or not way.is_compiled:
            self.why_not = f"a loop around the optimizer step is not followed{way.whose}"
        elif gathers:
            self.why_not = (
                f"the optimizer step is taken within {gathers}, and its results so far are in no variable: use a `for` "
                "loop instead"
            )

    @property
    def around(self) -> list[loops.Loop]:
        """All active followed loops, outermost first."""
        return [loop for of_frame in self.active for loop in of_frame]


def look(frame: FrameType | None) -> Whereabouts:
    """The script's place, seen from a frame."""
    stack: list[FrameType] = []
    key: list[int] = []
    while frame is not None:
        stack += (frame,)
        key += id(frame.f_code), frame.f_lasti
        frame = frame.f_back
    path = tuple(key)
    way = _ways.get(path)
    if way is None:
        if len(_ways) >= _MOST_WAYS:
            _ways.clear()
        way = _ways[path] = _Way(stack)
    return Whereabouts(way, stack)
