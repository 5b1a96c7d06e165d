"""The script's place when it steps an optimizer: the user's frames, and the loops around the step.

Most of that follows from the instructions on the call stack: whose code they are, and the loops around them. A training
loop reaches its step by the same instructions each time, so this is computed once for each such stack. Begin with
`look`.

A running comprehension, and a call such as sum(...) or list(map(...)), keep their results so far outside of variables:
they are in no record, and would be missing from a replacement's result. Only the most common calls are known, by name;
other calls are recognized if they consume a generator expression. The place of an instruction is looked up in the
source, since the compiler inlines comprehensions (from Python 3.12 on), and moves handlers to the end.

Loops in code that is not the user's (a framework's training loop around a step, or one in a suspended generator that
the script takes batches from) are not followed, so their position and variables are unknown (`why_not`). Foreign code
that only forwards a step (a wrapped optimizer, a context manager) need not be followed.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from ttprun import frameworks
from ttprun.capture.position import control_flow, disk_cache, liveness, loops, user_code
from ttprun.capture.position.control_flow import instruction_at
from ttprun.introspect import ownership
from ttprun.introspect.ownership import is_script_code, place, variables_of
from ttprun.introspect.safe_reads import is_a

# Their loops are not training loops: they run threads, event loops and hooks.
_HARMLESS = tuple(
    path.rstrip(os.sep) + os.sep
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    )
)
# These read the command line, and call the script's main function from a loop of theirs.
_CALLERS = frozenset({"absl", "click", "fire", "hydra", "typer"})
_TRIED = frozenset(name.partition(".")[0] for name in frameworks.FOLLOW)
_SITE = f"{os.sep}site-packages{os.sep}"


def why_not(frame: FrameType | None) -> str:
    """Why a step that is taken below a frame cannot be replayed: foreign code. "" if there is none."""
    loop, modules = loop_around(frame)
    if loop:
        return f"the optimizer step is taken in a loop of {loop}, {_what_follows(modules)}"
    modules = keeper_of_a_loss(frame)
    if modules:
        return (
            f"the optimizer step is taken in a function of {next(iter(modules))} that holds the step's loss, which a "
            f"replacement would return otherwise, and {_what_follows(modules)}"
        )
    return ""


def _what_follows(modules: dict[str, str]) -> str:
    """What becomes of modules that are not followed yet, or what the user can do."""
    is_new = ownership.is_remembering() and not any(map(ownership.is_seen_before, modules.values()))
    if is_new and all(disk_cache.note(filename) for filename in modules.values()):
        return f"which is met for the first time: {disk_cache.NEXT_RUN}"
    return (
        "which is not the script's own code and is not followed; if it is a framework's training, try this line in the "
        f"configuration: follow: [{', '.join(modules)}]"
    )


def what_follows_of(frame: FrameType | None) -> str:
    """What becomes of a generator of foreign code that is suspended in a loop: "whose loop ..."; "" if it has none.

    frame   the generator's; None: it has ended
    """
    if frame is None or not _is_foreign(frame) or not _is_in_loop(frame):
        return ""
    return _what_follows_of(str(frame.f_globals.get("__name__")), frame.f_code.co_filename)


@functools.cache  # asked at each step
def _what_follows_of(module: str, filename: str) -> str:
    return f"whose loop {_what_follows({module: filename}).removeprefix('which ')}"


def _is_in_loop(frame: FrameType) -> bool:
    return control_flow.instruction_at(frame.f_code, frame.f_lasti) in control_flow.looping(frame.f_code)


def loop_around(frame: FrameType | None) -> tuple[str, dict[str, str]]:
    """The outermost active loop in foreign code.

    returns   its function and file, "" if there is none; and the modules to follow with their files, outermost first:
              those of frames on the stack that are in a package with such a loop
    """
    description, packages, modules = "", set(), []
    while frame is not None:
        code = frame.f_code
        if _is_foreign(frame):
            module = str(frame.f_globals.get("__name__"))
            modules.append((module, code.co_filename))
            if _is_in_loop(frame):
                description = f"{code.co_qualname} ({code.co_filename})"
                packages.add(_package_of(module))
        frame = frame.f_back
    return description, {name: filename for name, filename in reversed(modules) if _package_of(name) in packages}


def is_called_in_a_loop(frame: FrameType, outer: FrameType) -> bool:
    """Whether one of the frames between two frames of the user's is in a loop: it may call the inner one again.

    frame, outer   next to each other among the user's, the inner one first
    """
    between = frame.f_back
    while between is not None and between is not outer:
        if _is_in_loop(between):
            return True
        between = between.f_back
    return False


def keeper_of_a_loss(frame: FrameType | None) -> dict[str, str]:
    """The module of foreign code on the stack that holds a loss of this step, and may return it, with its file.

    Nothing records its variables: in a replacement they would hold what the replay has computed. Packages of which some
    modules are followed are known to return none.
    """
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if _is_foreign(frame) and _package_of(module) not in _TRIED and _holds_loss(frame):
            return {module: frame.f_code.co_filename}
        frame = frame.f_back
    return {}


def _holds_loss(frame: FrameType) -> bool:
    tensors = (value for value in variables_of(frame).values() if is_a(value, torch.Tensor))
    return any(value.grad_fn is not None and value.numel() == 1 for value in tensors)


def _package_of(module: str) -> str:
    return module.partition(".")[0]


def _is_foreign(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    package = _package_of(str(frame.f_globals.get("__name__")))
    if is_script_code(filename) or filename.startswith("<frozen") or package in _CALLERS:
        return False
    path = os.path.abspath(filename)
    return not path.startswith(_HARMLESS) or (_SITE in path and not path.startswith(_HARMLESS[2:]))


_WITH_LOOPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_ASKED_BY_LOOPS = frozenset({"FOR_ITER", "SEND"})
_GATHER = frozenset({
    "all", "any", "dict", "frozenset", "functools.reduce", "list", "max", "min", "reduce", "set", "sorted", "sum",
    "tuple",
})  # fmt: skip
# First line, first column, last line, last column. With -X no_debug_ranges Python keeps no columns.
Span = tuple[int, int, int, int]
_UNKNOWN = -1


@dataclass(frozen=True)
class _Loops:
    """The parts of a module's source that are evaluated in loops whose position is unknown.

    parts   what a comprehension evaluates for each item; of a generator expression, its inner loops
    excluded  functions and generators inside these parts, which may run at any time
    """

    parts: list[Span]
    excluded: list[Span]

    def hold(self, at: Span) -> bool:
        """Whether the code at a place is evaluated in these loops, or may be, if only its line is known."""
        is_excluded = _has_columns(at) and any(_is_within(at, part) for part in self.excluded)
        return not is_excluded and any(_is_within(at, part) for part in self.parts)


@dataclass(frozen=True)
class _Source:
    """What collects results in a module: calls of functions that consume an iterable, and loops."""

    calls: dict[Span, str]
    loops: list[_Loops]

    def call_at(self, at: Span) -> str:
        """The name of the function that is called there, or may be, if only its line is known; "" if none is."""
        if _has_columns(at):
            return self.calls.get(at, "")
        return next((name for span, name in self.calls.items() if _is_within(at, span)), "")


def gathering_of(frame: FrameType, outer: FrameType | None) -> str:
    """What collects results at the current instruction of a frame of the user's; "" if nothing does.

    outer   the next outer frame of the user's
    """
    code = frame.f_code
    source = _read(user_code.followed.get(code.co_filename, b""))
    at = _span_of(code, frame.f_lasti)
    if any(loops.hold(at) for loops in source.loops):
        return "a comprehension"
    if code.co_name == "<genexpr>" and outer is frame.f_back and outer is not None and not _stands_in_loop(outer):
        return "a generator expression that a call consumes"
    name = source.call_at(at)
    return name and f"a call of {name}"


def _stands_in_loop(frame: FrameType) -> bool:
    """Whether it consumes another generator by a loop or `yield from`, which keeps nothing."""
    code = frame.f_code
    return dis.opname[code.co_code[instruction_at(code, frame.f_lasti)]] in _ASKED_BY_LOOPS


def _span_of(code: CodeType, instruction: int) -> Span:
    """The place of an instruction in the source; _UNKNOWN if it has none."""
    span = next(itertools.islice(code.co_positions(), instruction // 2, None))
    line, last_line, column, last_column = (_UNKNOWN if place is None else place for place in span)
    return line, column, last_line, last_column


@functools.cache
def _read(source: bytes) -> _Source:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python has warned when the module was compiled
        nodes = list(ast.walk(ast.parse(source)))
    calls = {
        _span(node): name
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name | ast.Attribute)
        and (name := ast.unparse(node.func)) in _GATHER
    }
    return _Source(calls, [_loops_of(node) for node in nodes if isinstance(node, _WITH_LOOPS)])


def _loops_of(node: Any) -> _Loops:
    """The hidden loops of a comprehension, or of a generator expression, whose outermost iterator is a variable."""
    parts = _inside(node, node.generators[isinstance(node, ast.GeneratorExp) :])
    return _Loops([*map(_span, parts)], [*map(_span, _functions_in(parts))])


def _inside(node: Any, loops: list[ast.comprehension]) -> list[ast.expr]:
    """What is evaluated within these innermost loops of a node, without the iterable of the first of them."""
    if not loops:
        return []
    items = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    of_rounds = [part for loop in loops for part in (loop.target, *loop.ifs)]
    return [*items, *of_rounds, *(loop.iter for loop in loops[1:])]


def _functions_in(parts: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The parts that are evaluated by a function or generator of their own."""
    for node in itertools.chain.from_iterable(map(ast.walk, parts)):
        if isinstance(node, ast.Lambda):
            yield node.body
        elif isinstance(node, ast.GeneratorExp):
            yield from _inside(node, node.generators)


def _span(node: Any) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _has_columns(at: Span) -> bool:
    return at[1] != _UNKNOWN


def _is_within(inner: Span, outer: Span) -> bool:
    """Whether `inner` is within `outer`; without columns, whether its line is."""
    if not _has_columns(inner):
        return outer[0] <= inner[0] <= outer[2]
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]


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
            and is_called_in_a_loop(frame, outer)
            and not control_flow.is_within_another(frame.f_code, self.loops[0].key)
        )
        self.gathering = gathering_of(frame, outer)
        self.dead = sorted(liveness.dead_in(frame))
        self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Way:
    """What follows from the instructions on a stack.

    codes         of all frames; held here, since a stack is identified by their ids
    place         as in a record
    frames        the user's, outermost first
    foreign       why foreign code prevents a replay: see call_site.py
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
        self.foreign = why_not(stack[0])
        others = [name for index in indexes if (name := stack[index].f_code.co_filename) not in user_code.followed]
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
        self.unfollowed: list[loops.Site] = []
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
