"""Sources of data that can be read only once: files that are read, queues that are filled.

A file is set to its position. A queue gets its items back; but a thread or process of the script that fills it starts
again in a replacement, and its progress is unknown. A queue that the main thread fills and only another thread reads (a
log, a tracker) is an effect, and its items are left alone: at a fault a few entries may be missing from the log, or be
there twice.
"""

from __future__ import annotations

import io
import multiprocessing.process
import threading
import weakref
from typing import Any

from ttprun.capture.records.nodes import ClosedNode, EffectNode, FileNode, RefusedNode, SameNode
from ttprun.capture.values import objects
from ttprun.capture.values.not_proved import record_not_proved
from ttprun.capture.values.plain import decode
from ttprun.capture.values.process_local import record_same
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot
from ttprun.capture.values.type_names import name_of, short_name
from ttprun.introspect.whose import is_script_code

_ABSTRACT = (io.IOBase, io.RawIOBase, io.BufferedIOBase, io.TextIOBase)


def record_file(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A file: the position of one that is read; of one that is written (see script_files.py), whether it is open."""
    kind, ask = name_of(type(value)), type(value)
    if objects.is_of_user(ask):  # its own methods may do anything
        ask = next(base for base in ask.__mro__ if base.__module__ in ("_io", "io"))
        if ask in _ABSTRACT:
            return objects.record_object(snapshot, value, depth)
    if ask.closed.__get__(value):
        return ClosedNode(kind)
    if ask.writable(value) or not ask.readable(value) or not ask.seekable(value) or id(value) in snapshot.followed:
        return SameNode(kind, "")
    try:
        position = ask.tell(value)
    except OSError:  # a text file that is read line by line
        return RefusedNode("is a file that is read by next(), which hides its position: read it by a `for` loop")
    return FileNode(snapshot.number(value), kind, position)


def record_map(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A file in memory, mmap.mmap, by its position."""
    kind = name_of(type(value))
    return ClosedNode(kind) if value.closed else FileNode(snapshot.number(value), kind, value.tell())


def restore_file(restore: Restore, live: Any, node: FileNode, name: str) -> Any:
    """Set it to the lost rank's position."""
    kind = node.kind
    if name_of(type(live)) != kind or live.closed:
        return restore.refuse(live, unlike(name, kind, live, f"an open {short_name(kind)}"))
    if restore.claim_or_refuse(node.number, live, name):
        live.seek(decode(node.position))
    return live


def record_queue(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A queue between threads, with what it holds; one that only goes out is left alone."""
    if goes_out(value):
        return EffectNode(name_of(type(value)))
    return _refused_if_fed() or objects.record_object(snapshot, value, depth)


class _Users:
    """Who has used a queue: idents of threads."""

    __slots__ = ("consumers", "producers", "reference")

    def __init__(self, value: Any) -> None:
        self.reference = weakref.ref(value)
        self.consumers: set[int] = set()
        self.producers: set[int] = set()


_users: dict[int, _Users] = {}  # by the queue's id


def _users_of(value: Any) -> _Users:
    users = _users.get(id(value))
    if users is None or users.reference() is not value:
        for key in [key for key, other in list(_users.items()) if other.reference() is None]:
            _users.pop(key, None)
        users = _users[id(value)] = _Users(value)
    return users


def wrap_get(original: Any) -> Any:
    """queue.Queue.get: know which threads take from a queue."""

    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        _users_of(self).consumers.add(threading.get_ident())
        return original(self, *args, **kwargs)

    return get


def wrap_put(original: Any) -> Any:
    """queue.Queue.put: know which threads put something in."""

    def put(self: Any, *args: Any, **kwargs: Any) -> Any:
        _users_of(self).producers.add(threading.get_ident())
        return original(self, *args, **kwargs)

    return put


def goes_out(value: Any) -> bool:
    """Whether nothing comes back to the main thread through this queue: others take from it, and it alone gives."""
    users = _users_of(value)
    main = threading.main_thread().ident
    return bool(users.consumers) and main not in users.consumers and users.producers <= {main}


def record_thread(snapshot: Snapshot, value: threading.Thread, depth: int) -> Any:
    """A thread: one that only writes what it is given is an effect, another one of the script's that runs is named."""
    if not threading.Thread.is_alive(value):
        is_own = objects.is_of_user(type(value))
        return objects.record_object(snapshot, value, depth) if is_own else EffectNode(name_of(type(value)))
    if _is_of_script(value) and not _only_writes(value):
        return record_not_proved(snapshot, value, "it runs beside the main thread, and how far it is is not known")
    return EffectNode(name_of(type(value)))


def _only_writes(thread: threading.Thread) -> bool:
    queues = [users.reference() for users in list(_users.values()) if thread.ident in users.consumers | users.producers]
    return bool(queues) and all(queue is None or goes_out(queue) for queue in queues)


def record_line(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A queue or pipe between processes."""
    return _refused_if_fed() or record_same(snapshot, value, depth)


def _refused_if_fed() -> RefusedNode | None:
    who = _helpers_of_script()
    return RefusedNode(f"is shared with {who}, and how far that had come is not known") if who else None


_workers: weakref.WeakSet[Any] = weakref.WeakSet()


def is_worker(process: Any) -> None:
    """A process is a DataLoader's: loaders.py knows how far it has come."""
    _workers.add(process)


def _helpers_of_script() -> str:
    """A thread or process that the script has started and that lives, in words; "" if there is none."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and _is_of_script(thread):
            return f"the thread '{thread.name}'"
    for process in list(multiprocessing.process._children):  # type: ignore[attr-defined]
        if process not in _workers:
            return f"the process '{process.name}'"
    return ""


def _is_of_script(thread: threading.Thread) -> bool:
    """Whether its code is the user's: that of the function that it was given, or of a class that says what it does."""
    given = getattr(thread, "_target", None)
    code = getattr(type(thread).run if given is None else given, "__code__", None)
    return code is not None and is_script_code(code.co_filename)
