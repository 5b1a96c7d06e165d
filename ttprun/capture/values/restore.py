"""Write recorded values into the variables of a replacement.

`Restore` walks the recorded nodes together with the replacement's values of the same names. Mutable values are changed
in place, since something else may hold them too; immutable ones are replaced; what the replay must have reproduced is
compared: process-local values by type (process_objects.py), large ones by samples (large.py). Anything else is refused
with the variable's name. kinds.py has the functions for each kind of node.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch

from ttprun.capture.position.judgement import DEAD, NO_STATE, judge
from ttprun.capture.records.nodes import AnyNode, EffectNode, Node, SameNode
from ttprun.capture.records.packing import MISSING, CannotRestoreError, listed, name_of, short_name
from ttprun.capture.values.snapshot import Snapshot, is_hidden, with_fixed
from ttprun.introspect import fail_open
from ttprun.introspect.ownership import set_local, unset_local, variables_of
from ttprun.introspect.tensor_bytes import places
from ttprun.protocol.reason import Reason

# Restores a value from one kind of node: restore_... with these four arguments.
#
#   restore  the walk, which knows the counterparts of numbers
#   live     what the replacement has there, MISSING if nothing; changed in place where that is possible
#   node     of the kind that it is registered for
#   name     of the variable, with the way into it ("model.layers[0]"), for reasons
#   returns  what is to be there; `live` itself if that stays
#
# Raises CannotRestoreError by way of `Restore.refuse`.
Restorer = Callable[["Restore", Any, Any, str], Any]
RESTORERS: dict[type[AnyNode], Restorer] = {}


class Restore:
    """One walk over a record.

    blobs           the modules' tensors, in the order of the snapshot: bytes of each
    is_comparing    this is the boundary itself: what does not match counts. Before it, what does not match may still
                    change, and is left as it is
    is_strict       what cannot be restored raises CannotRestoreError; else the replay's own is left, and is a doubt
    stepped         the tensors that the optimizers update here, in the order of the snapshot's numbers
    storages        counterparts of the record's memory, by the number of the tensor with which it is recorded
    taken           their addresses
    claims          numbers in the record, by the ids of their counterparts
    doubts          variables that do not match, each with the difference; a dead one (position/liveness.py) is none
    unrecorded      the same of variables that the lost rank could not record, which it has named
    named           what the replay has not made, in words: it has no state, or was made again from its attributes
    """

    def __init__(
        self,
        blobs: list[memoryview],
        is_comparing: bool,
        stepped: Sequence[torch.Tensor] = (),
        is_strict: bool = True,
    ) -> None:
        self.doubts: list[Reason] = []
        self.unrecorded: list[Reason] = []
        self.named: list[str] = []
        self.stepped = stepped
        self.is_comparing = is_comparing
        self._is_strict = is_strict
        self._is_dead = False
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.taken: set[int] = set()
        self._blobs = blobs
        self._objects: dict[int, Any] = {}
        self.claims: dict[int, int] = {}
        self._unused: list[Any] = []
        self._trees: dict[int, int] = {}  # objects in each tree of data, by its first number
        self._places: dict[int, int] | None = None
        self._code: types.CodeType | None = None  # of the frame that is written

    def frame(
        self, frame: types.FrameType, recorded: dict[str, Any], where: str, dead: Container[str] = frozenset()
    ) -> None:
        """Write a frame's variables but the dead ones; mutable ones are changed in place.

        frame      a function's or generator's, of the replacement
        recorded   variable -> node, of the same frame in the lost rank
        where      goes before each variable's name in a reason
        dead       variables that the script sets again before it reads them
        """
        scope, around, self._code = variables_of(frame), self._code, frame.f_code
        written, gone = self._changes(scope, recorded, where, dead)
        self._code = around
        for name, value in written.items():
            set_local(frame, name, value)
        for name in gone:
            if name not in dead and not unset_local(frame, name):
                self.refuse(None, f"{where}{name} is set here, and was not in the lost rank")

    def code(self, where: str) -> types.CodeType | None:
        """The code of a generator expression of the frame that is written; None: there is none or more than one.

        where   as `place_of` gives it
        """
        constants = self._code.co_consts if self._code is not None else ()
        there = [code for code in constants if isinstance(code, types.CodeType) and place_of(code) == where]
        return there[0] if len(there) == 1 else None

    def module(self, scope: dict[str, Any], recorded: dict[str, Any], where: str) -> None:
        """Write the variables of a module that has no frame on the stack.

        scope             the module's dictionary, changed in place
        recorded, where   as for `frame`
        """
        written, gone = self._changes(scope, recorded, where)
        scope.update(written)
        for name in gone:
            del scope[name]

    def _changes(
        self, scope: Mapping[str, Any], recorded: dict[str, Any], where: str, dead: Container[str] = frozenset()
    ) -> tuple[dict[str, Any], list[str]]:
        """What to write, and what to delete."""
        nodes = with_fixed(recorded)
        written = {}
        for name, node in nodes.items():
            live = scope.get(name, MISSING)
            self._is_dead = judge(node, name in dead) is DEAD
            try:
                value = self._value_or_doubt(live, node, f"{where}{name}")
            finally:
                self._is_dead = False
            if value is not live and value is not MISSING:
                written[name] = value
        return written, [name for name in scope if name not in nodes and not is_hidden(name)]

    def _value_or_doubt(self, live: Any, node: Any, name: str) -> Any:
        """As `value`; what cannot be restored because of an error in it is a doubt, too."""
        try:
            return self.value(live, node, name)
        except Exception as error:
            fail_open.raise_if_meant(error)
            if self._is_strict or not self.is_comparing:
                raise
            return self.refuse(live, f"{name} cannot be restored: {error}")

    @contextlib.contextmanager
    def strictly(self) -> Iterator[None]:
        """What does not match here is refused in any case."""
        was_strict, self._is_strict = self._is_strict, True
        try:
            yield
        finally:
            self._is_strict = was_strict

    def value(self, live: Any, node: Any, name: str) -> Any:
        """The value that replaces `live`; `live` itself if it was changed in place or is left as it is.

        live   MISSING if the variable is not set
        name   of the variable, with the way into it ("model.layers[0]"), for reasons
        """
        if not isinstance(node, AnyNode):
            return node
        return RESTORERS[type(node)](self, live, node, name)

    def claim(self, number: int, value: Any) -> bool:
        """Make `value` the counterpart of an object of the record; False if it is that of another one already."""
        if self.claims.setdefault(id(value), number) != number:
            return False
        self._objects[number] = value
        return True

    def disclaim(self, number: int) -> None:
        """What was made as the counterpart of an object of the record is not used."""
        self._unused.append(self._objects.pop(number))  # alive, so that nothing else has its id

    def hold(self, number: int, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Make `storage` the counterpart of memory of the record; returns it."""
        self.storages[number] = storage
        self.taken.add(storage.data_ptr())
        return storage

    def claim_or_refuse(self, number: int, value: Any, name: str) -> bool:
        """Claim the only candidate. Refuses if `value` is the counterpart of another object already.

        number   of the object in the record
        name     as for `value`
        """
        if self.claim(number, value):
            return True
        self.refuse(value, f"{name} is an object of its own in the lost rank, and shared with another name here")
        return False

    def known(self, number: int, live: Any, name: str) -> Any:
        """The counterpart of an earlier object of the record.

        number       of the object in the record
        live, name   as for `value`
        """
        if number in self._objects:
            return self._objects[number]
        return self.refuse(live, f"{name} holds an object that could not be restored elsewhere")

    def claim_tree(self, first: int, objects: Sequence[Any]) -> None:
        """Make objects the counterparts of those of a tree of data, whose numbers follow one another."""
        for number, value in enumerate(objects, first):
            self.claim(number, value)
            if type(value) is torch.Tensor:  # nothing else of the record is to be written there
                self.hold(number, value.untyped_storage())
            elif type(value) is numpy.ndarray:
                self.taken.add(value.__array_interface__["data"][0])
        self._trees[first] = len(objects)

    def tree_around(self, number: int) -> int:
        """The first number of the tree of data that an object of the record is in; its own if it is in none."""
        return next((first for first, count in self._trees.items() if first <= number < first + count), number)

    def object_of(self, number: int) -> Any:
        """The counterpart of an object of the record, MISSING if there is none."""
        return self._objects.get(number, MISSING)

    def items(self, live: Any, nodes: Any, name: str) -> list[Any]:
        """Values of a container's items, each set over its counterpart in `live`.

        live      the container's items here, in order; fewer or more are no error
        nodes     a list of nodes, or the same packed
        name      of the container
        returns   those that are here; see `are_all_here`
        """
        values = [
            self.value(live[i] if i < len(live) else MISSING, node, f"{name}[{i}]")
            if isinstance(node, AnyNode)
            else node
            for i, node in enumerate(listed(nodes))
        ]
        if any(value is MISSING and not has_no_state(node) for value, node in zip(values, listed(nodes), strict=True)):
            self.refuse(live, f"{name} holds objects that are not in the replacement and cannot be recorded")
        return [value for value in values if value is not MISSING]

    @staticmethod
    def are_all_here(items: list[Any], nodes: Any) -> bool:
        """Whether no item of `items` is missing, but for what has no state."""
        return len(items) == len(listed(nodes)) or len(items) == sum(not has_no_state(node) for node in listed(nodes))

    def blob(self, index: int) -> memoryview:
        """The bytes of one blob."""
        return self._blobs[index]

    def forget(self) -> None:
        """The walk is over: something in it (an exception with its frames) may last, but none of what it has met.

        An iterator over a DataLoader that is still there counts as one in use.
        """
        self._objects.clear()
        self.claims.clear()

    def snapshot(self, live: Any) -> Node:
        """The node that this process would record for a value."""
        if self._places is None:
            self._places = places(self.stepped)
        # A file or iterator that is only compared is one that a loop uses: its position is the loop's.
        return Snapshot(self._places, [id(live)], is_separate=True).node(live, 0)

    def is_same(self, condition: bool, name: str, what: str) -> None:
        """A doubt unless `condition` holds.

        what   completes the sentence that begins with the name
        """
        if self.is_comparing and not self._is_dead and not condition:
            self.doubts.append(Reason("other-variable", f"{name} {what}"))

    def leave_out(self, live: Any, node: SameNode | EffectNode, name: str) -> Any:
        """What has no state by nature, and the replay has not made, stays as it is: returns `live`.

        An evaluation makes such a thing, say, which the replay has passed over. All ranks would come to the same if
        they went back. It is named.
        """
        if self.is_comparing and not self._is_dead:
            why = f"{name}, a {short_name(node.kind)}, is not in the replacement, which has not run what makes it"
            if self._is_strict:
                raise CannotRestoreError(Reason("made-without-constructor", why))
            self.named.append(why)
        return live

    def note_age(self, name: str, age: int) -> None:
        """Of the lost rank's, not all was looked at at the boundary itself: what has never changed is, in turns."""
        if self.is_comparing and not self._is_dead:
            steps = "1 step" if age == 1 else f"{age} steps"
            self.named.append(f"{name} had never changed, and was last seen whole {steps} before")

    def note_made(self, live: Any, name: str) -> None:
        """An object was made as pickle would, without its constructor."""
        if not self._is_dead:
            self.named.append(f"{name}, a {kind_of(live)}, was made again from its attributes, without its constructor")

    def refuse(self, live: Any, why: str | Reason, is_unrecorded: bool = False) -> Any:
        """This value does not match: `live` stays, or CannotRestoreError is raised.

        live            returned
        why             a sentence that begins with the variable's name, or a reason of a kind of its own
        is_unrecorded   the lost rank has named it as what it cannot record
        """
        if self.is_comparing and not self._is_dead:
            why = why if isinstance(why, Reason) else Reason("other-variable", why)
            if self._is_strict:
                raise CannotRestoreError(why)
            (self.unrecorded if is_unrecorded else self.doubts).append(why)
        return live


def kind_of(value: Any) -> str:
    """The name of a value's type, for a reason."""
    if value is MISSING:
        return "not set"
    return value.__qualname__ if isinstance(value, type) else type(value).__qualname__


def place_of(code: types.CodeType) -> str:
    """Where this code stands: file, name and first line."""
    return f"{code.co_filename}:{code.co_qualname}:{code.co_firstlineno}"


def unlike(name: str, kind: str, live: Any, what: str = "") -> str:
    """How a value differs from the lost rank's, for a reason.

    kind   full name of the type that it had there
    what   which one it was there, if the type does not say it
    """
    here = "nothing" if live is MISSING else "another one"
    if live is not MISSING and kind_of(live) != short_name(kind):
        here = f"a {kind_of(live)}"
    elif live is not MISSING and not what and name_of(type(live)) != kind:
        what, here = f"a {kind}", f"a {name_of(type(live))}"
    return f"{name} is {what or f'a {short_name(kind)}'} in the lost rank, and the replacement has {here}"


def has_no_state(node: Node) -> bool:
    """Whether what a node stands for has no state by nature."""
    return isinstance(node, SameNode | EffectNode) and judge(node) is NO_STATE


def restore_same(restore: Restore, live: Any, node: SameNode, name: str) -> Any:
    """Compare what the replay must have reproduced; nothing is written."""
    if has_no_state(node) and (live is MISSING or live is None):
        return restore.leave_out(live, node, name)
    if live is MISSING:
        return restore.refuse(
            live, f"{name} is a {short_name(node.kind)} in the lost rank, cannot be recorded, and is not set here"
        )
    mine = restore.snapshot(live)
    if not isinstance(mine, SameNode) or mine.kind != node.kind:
        return restore.refuse(live, unlike(name, node.kind, live))
    if mine != node:
        return restore.refuse(
            live, f"{name}, a {short_name(node.kind)}, differs from the lost rank's, and cannot be recorded"
        )
    return live
