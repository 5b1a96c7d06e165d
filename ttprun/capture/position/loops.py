"""Positions of the `for` loops in the user's code, and jumping to them in a replay.

User modules are compiled with each loop

    for x in EXPR: ...

turned into

    for x in __ttprun_loop__(KEY, __ttprun_enter__(KEY), EXPR): ...

and in a generator into

    for x in (yield from __ttprun_owed__(__ttprun_loop__(KEY, __ttprun_enter__(KEY), EXPR))): ...

KEY is "file:7:4", the loop's place, the same in every process. The script's variables stay as they are:
the `for` alone holds the iterator that we return, so it dies with the loop, also at `break` and at an exception, and
`_running` finds it by the frame that runs the loop. Code that torch.compile traces iterates over EXPR itself.

The state of a `while` loop is in variables, which are restored where an optimizer steps inside. If each pass makes an
optimizer, as in a sweep, they are needed before that: `while TEST: ...` is compiled as

    while TEST:
        if KEY in __ttprun_passes__.noted: __ttprun_passes__.begin(KEY)
        ...

and made_inside.py says of which loops the passes are noted.

Most loops never have an optimizer step inside. Those cost two calls each time they begin and nothing per item: after a
few times without a step inside, the loop iterates over EXPR itself.
"""

from __future__ import annotations

import csv
import inspect
import io
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from types import CodeType, FrameType, GeneratorType
from typing import Any, ClassVar, NamedTuple

from ttprun.capture.position import control_flow
from ttprun.capture.position.placeholders import END, FirstJump, hand_out, pass_over
from ttprun.capture.records.packing import LoopRecord, PassRecord
from ttprun.introspect import random_state, signal_handlers
from ttprun.introspect.ownership import SCALARS
from ttprun.introspect.signal_handlers import waiting


class Extent(NamedTuple):
    """Where a `for` or `while` statement stands in its file; lines begin at 1, columns (in bytes) at 0.

    start              of the statement
    over               of EXPR, or the condition
    body, body_end     of its body, without `else`
    """

    start: tuple[int, int]
    over: tuple[int, int]
    body: tuple[int, int]
    body_end: tuple[int, int]
    is_while: bool = False

    def is_around(self, line: int, column: int | None, is_next: bool) -> bool:
        """Whether an instruction that comes from there is executed within the loop.

        column    None: unknown
        is_next   the instruction takes the next item of a loop
        """
        if column is None:
            return self.body[0] <= line <= self.body_end[0] or (is_next and line == self.over[0])
        return self.body <= (line, column) < self.body_end or (is_next and (line, column) == self.over)


class Site:
    """One `for` or `while` statement of the user's code.

    key          file:line:column, the same in every rank
    has_steps    an optimizer step has been seen inside
    is_outer     ... and inside of another loop that is inside of this one
    begun        how often a followed loop of it has begun
    """

    __slots__ = ("began", "begun", "has_steps", "is_outer", "key", "place")

    def __init__(self, key: str, place: Extent) -> None:
        self.key = key
        self.place = place
        self.began = 0
        self.begun = 0
        self.has_steps = False
        self.is_outer = False

    def note_step(self) -> None:
        """An optimizer step has been seen inside."""
        if not self.has_steps:
            self.has_steps = True
            keys_with_steps.append(self.key)


sites: dict[str, Site] = {}  # by their keys
keys_with_steps: list[str] = []  # of the sites that have any


def new_site(filename: str, place: Extent) -> str:
    """Register a loop; returns the key that the compiled code calls it by."""
    key = "{}:{}:{}".format(filename, *place.start)
    sites[key] = Site(key, place)
    return key


TRIALS = 8  # times that a loop is followed before it is assumed to have no step inside
# Types that do not start again when another loop iterates over them.
_READ_ON = (GeneratorType, io.IOBase, type(csv.reader(())), csv.DictReader)


class Loop:
    """An active loop.

    position     items yielded so far
    lead         items yielded before the first boundary inside was reached; 0 before that
    began_with   states of the random generators before EXPR was evaluated
    over         EXPR, if it is a generator, or a file or table that is read line by line
    bounds       (start, stop, step) of EXPR, if it is a range
    item_rng     the same when the current item was yielded, for loops around other loops
    earlier      loops of its site that had ended before it, if a library's loop calls the function again and again:
                 each call is a training of its own
    number       loops of all sites that had begun before it
    determines_all  its position is known to determine the state of all that it iterates over; see iterables.py
    """

    __slots__ = (
        "__weakref__",
        "_following",
        "_iterable",
        "began_with",
        "bounds",
        "current",
        "determines_all",
        "earlier",
        "item_rng",
        "lead",
        "number",
        "over",
        "position",
        "site",
    )

    def __init__(self, site: Site, began_with: random_state.RngState | None, iterable: Iterable[Any]) -> None:
        self.site = site
        self.began_with = began_with
        self.position = 0
        self.lead = 0
        self.item_rng: random_state.RngState | None = None
        self.current: Any = None
        self.over = iterable if isinstance(iterable, _READ_ON) else None
        self.bounds = [iterable.start, iterable.stop, iterable.step] if isinstance(iterable, range) else None
        self.determines_all = False
        self.earlier = 0
        self.number = Begun.count
        self._iterable: Iterable[Any] | None = iterable
        self._following: weakref.ref[Generator[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        # Called once, by the `for`, which alone holds the result: so EXPR is released when the loop is left.
        iterable, self._iterable = self._iterable, None
        assert iterable is not None
        following = self._follow(iterable)
        self._following = weakref.ref(following)
        return following

    def is_running(self) -> bool:
        """Whether its `for` statement is under way."""
        following: Any = self._following() if self._following is not None else None
        return following is not None and following.gi_frame is not None

    def items(self) -> Any:
        """The iterator that it uses, None if the loop has been left."""
        following = self._following() if self._following is not None else None
        return inspect.getgeneratorlocals(following).get("items") if following is not None else None

    @signal_handlers.is_gate
    def _follow(self, iterable: Iterable[Any]) -> Generator[Any]:
        site = self.site
        items = signal_handlers.call_through(self._begin, (iterable,), {})
        while (item := _next_of(items)) is not END:
            self.position += 1
            self.current = _plain(item)
            if site.is_outer or self.position < 3:
                self.item_rng = self._random_states()
            if site.key in passes:
                (Passes.begin if site.is_outer else passes.pop)(site.key)
            if waiting:
                signal_handlers.leave(is_from_c=True)
            yield (item, item := None)[0]  # the script alone keeps an item alive
        if waiting:
            signal_handlers.leave(is_from_c=True)

    def _begin(self, iterable: Iterable[Any]) -> Iterator[Any]:
        return iter(iterable)

    def _random_states(self) -> random_state.RngState:
        return random_state.capture()

    def note_suspended(self) -> None:
        """Its generator is suspended, and a step has been reached."""
        self.site.began = 0  # keep following it
        if not self.lead:
            self.lead = self.position

    def record(self, over: Any = None) -> LoopRecord:
        """The loop as a part of a boundary's record; `over` is the node of what it iterates over."""
        following: Any = self._following() if self._following is not None else None
        return LoopRecord(
            site=self.site.key,
            position=self.position,
            lead=self.lead,
            began_with=self.began_with,
            item_rng=self.item_rng if self.site.is_outer else None,
            current=self.current,
            bounds=self.bounds,
            earlier=self.earlier,
            is_inside=following is not None and following.gi_running,
            over=over,
        )


@signal_handlers.leads_through
def _next_of(items: Iterator[Any]) -> Any:
    if waiting:
        signal_handlers.deliver()
    return next(items, END)  # a `for` would call iter() once more


class Jump(Loop):
    """A loop of a replay that begins at the lost rank's position."""

    __slots__ = ("_first_rng", "_record")

    def __init__(self, site: Site, record: LoopRecord, iterable: Iterable[Any]) -> None:
        self._record = record
        self._first_rng: random_state.RngState | None = record.item_rng
        super().__init__(site, record.began_with, iterable)

    def _begin(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """An iterator after the items that are skipped."""
        record = self._record
        self.lead = record.lead
        is_inside = record.is_inside  # the step is taken while the next item is made
        self.position = skip = record.position - (0 if is_inside else max(1, record.lead))
        if is_inside:
            self.current, self._first_rng = record.current, None
            if isinstance(iterable, GeneratorType):  # its own loops jump
                return iterable
        if isinstance(iterable, range) and record.bounds:
            return iter(self._rest(iterable, skip, record.bounds))
        if type(iterable) in (range, list, tuple, str) and record.lead == 1 and _is_whole(record.current):
            skip = _place_of(record.current, iterable, skip)
        return pass_over(iterable, skip)

    def _random_states(self) -> random_state.RngState:
        if self._first_rng is None:
            return random_state.capture()
        states, self._first_rng = self._first_rng, None
        random_state.restore(states)
        return states

    def _rest(self, iterable: range, skip: int, bounds: list[int]) -> range:
        """What is left of a range.

        bounds   the lost rank's: a script with resume code, which finds a later checkpoint, now begins elsewhere
        """
        self.bounds = bounds
        return range(*bounds)[skip:] if bounds[1:] == [iterable.stop, iterable.step] else range(0)


class JumpToNewEnd(Jump):
    """A jump in a run that resumes with other arguments: a range may end elsewhere now."""

    __slots__ = ()

    def _rest(self, iterable: range, skip: int, bounds: list[int]) -> range:
        start, _, step = bounds
        self.bounds = [start, iterable.stop, step]
        return range(*self.bounds)[skip:] if iterable.step == step else range(0)


def _plain(item: Any) -> Any:
    """The recordable part of an item: a scalar, or a list for a tuple; None for all else."""
    if type(item) in SCALARS:
        return item
    return [_plain(part) for part in item] if type(item) is tuple else None


def _is_whole(plain: Any) -> bool:
    """Whether a result of `_plain` is the whole item."""
    return all(map(_is_whole, plain)) if plain.__class__ is list else plain is not None


def _place_of(value: Any, values: Any, index: int) -> int:
    """The index in `values` of an item that was at `index` in the lost rank.

    A script with its own resume code starts its loop elsewhere than the lost rank did. If the value is missing, or not
    at its index and there several times, the position is unknown: the loop ends, and the replay is refused, since it
    does not reach the boundary.
    """
    plain = [_plain(item) for item in values]
    if index < len(plain) and plain[index] == value:
        return index
    return plain.index(value) if plain.count(value) == 1 else len(plain)


class Begun:
    """How many followed loops have begun so far."""

    count = 0


class Hooks:
    """Functions that the compiled code calls before it follows a loop.

    enter, loop, begin_pass    a replay's own functions, during the replay
    note_pass      what else begins a noted pass
    is_compiling   torch.compiler.is_dynamo_compiling, if the script has torch: code that it traces is left alone
    """

    enter: Callable[[Site, FrameType], Any] | None = None
    loop: Callable[[Site, Any, Iterable[Any]], Any] | None = None
    begin_pass: Callable[[str, FrameType], Any] | None = None
    note_pass: Any = None
    is_compiling: Callable[[], bool] | None = None


def take_over(
    enter: Callable[[Site, FrameType], Any],
    loop: Callable[[Site, Any, Iterable[Any]], Any],
    begin_pass: Callable[[str, FrameType], Any] | None = None,
) -> None:
    """A replay begins, and decides how loops begin until its first boundary.

    enter   called before a loop's EXPR is evaluated; what it returns is handed to `loop`
    loop    called with that and the value of EXPR; returns what the `for` runs over
    begin_pass   called with the key and the frame of a `while` loop, at the start of a noted pass
    """
    Hooks.enter, Hooks.loop, Hooks.begin_pass, FirstJump.is_open = enter, loop, begin_pass, True


def give_back() -> None:
    """The replay has reached its first boundary: loops are followed as in a run."""
    Hooks.enter, Hooks.loop, Hooks.begin_pass, FirstJump.is_open = None, None, None, False


def enter(key: str) -> Any:
    """Called before a loop's EXPR is evaluated."""
    if Hooks.is_compiling is not None and Hooks.is_compiling():
        return None
    site = sites[key]
    if Hooks.enter is not None:
        return Hooks.enter(site, sys._getframe(1))
    if not site.has_steps and site.began >= TRIALS:
        return None
    site.began += 1
    return random_state.capture()


def loop(key: str, token: Any, iterable: Iterable[Any]) -> Any:
    """Called with a loop's EXPR.

    key        of its site: file:line:column
    token      what `enter` has returned for it; None: the loop is not followed
    iterable   the value of EXPR
    returns    what the `for` runs over
    """
    if Hooks.is_compiling is not None and Hooks.is_compiling():
        return iterable
    if Hooks.loop is not None:
        made = Hooks.loop(sites[key], token, iterable)
    else:
        made = iterable if token is None else Loop(sites[key], token, iterable)
    if isinstance(made, Loop):
        made.site.begun += 1
        Begun.count += 1
        _running[id(sys._getframe(1)), key] = made
    return made


class Passes:
    """What the compiled code of a `while` loop asks; a class, whose attributes torch.compile can trace.

    noted   of each loop whose passes are noted, by its key, the newest one: the script's state at its start, from where
            a replay runs it; or why that is not known; "" if no replay needs it
    """

    noted: ClassVar[dict[str, PassRecord | str]] = {}

    @staticmethod
    def begin(key: str) -> None:
        """Called at the start of each pass of such a loop."""
        (Hooks.begin_pass or Hooks.note_pass)(key, sys._getframe(1))


passes = Passes.noted


def owed(loop: Any) -> Generator[Any, Any, Any]:
    """Called before a `for` in a generator with what it runs over: yields the items that the generator owes.

    In a replay its loop may begin in the middle, while a loop over the generator still requests the items before that.
    """
    if isinstance(loop, Jump):
        yield from hand_out()
    return loop


# (id of the frame, key of the site) -> its loop. A frame outlives its loops: its id is not reused as long as they run.
_running: weakref.WeakValueDictionary[tuple[int, str], Loop] = weakref.WeakValueDictionary()
# By the code's id, since hashing a code is slow; it is held here, so that its id is not reused.
_sites: dict[int, tuple[CodeType, list[Site], list[Site]]] = {}


def _sites_of(code: CodeType, is_while: bool = False) -> list[Site]:
    """The loops of a code, in their order: an outer one comes before those inside."""
    entry = _sites.get(id(code))
    if entry is None:
        own = [sites[constant] for constant in code.co_consts if type(constant) is str and constant in sites]
        own.sort(key=lambda site: site.place.start)
        whiles = [site for site in own if site.place.is_while]
        entry = _sites[id(code)] = (code, [site for site in own if site not in whiles], whiles)
    return entry[2] if is_while else entry[1]


def around(frame: FrameType, is_while: bool = False) -> list[Site]:
    """The `for` (or `while`) loops around a frame's instruction, outermost first, followed or not."""
    if not (of_code := _sites_of(frame.f_code, is_while)):
        return []
    opname, line, column = control_flow.position_of(frame)
    return [site for site in of_code if site.place.is_around(line, column, is_next=opname == "FOR_ITER")]


def of_frame(frame: FrameType) -> list[Loop]:
    """The active followed loops of a frame, outermost first."""
    loops, key = [], id(frame)
    for site in _sites_of(frame.f_code):  # plain lines, as at each boundary
        loop = _running.get((key, site.key))
        if loop is not None and loop.is_running():
            loops.append(loop)
    return loops


def note_steps(active: list[Loop], not_followed: list[Site]) -> None:
    """An optimizer step has been reached inside these loops (outermost first)."""
    for depth, loop_ in enumerate(active):
        loop_.site.note_step()
        if depth + 1 < len(active):
            loop_.site.is_outer = True
        if not loop_.lead:
            loop_.lead = loop_.position
    for site in not_followed:
        site.note_step()
