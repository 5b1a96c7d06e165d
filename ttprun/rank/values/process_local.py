"""What a replay makes again by itself (left_to_replay.py says what, and why): only the type is compared, or a digest.

A file that is closed can be made again.
"""

from __future__ import annotations

import io
import weakref
from typing import Any

import xxhash

from ttprun.rank.values.nodes import Tag, name_of, pack
from ttprun.rank.values.not_proved import record_not_proved
from ttprun.rank.values.restore import Restore
from ttprun.rank.values.snapshot import Snapshot


def record_same(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """Compared by type."""
    return [Tag.SAME, name_of(type(value)), ""]


def record_future(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """Work that another thread or process was given: compared with what it gives, once that is known."""
    if not value.done():
        return [
            Tag.REFUSED,
            "is work of another thread or process that is not done, and what it will give is not known",
        ]
    if value.cancelled() or value.exception() is not None:
        return [Tag.SAME, name_of(type(value)), "cancelled" if value.cancelled() else repr(value.exception())]
    return _same_if_alike(snapshot, value, value.result(), depth)


def record_context_variable(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A contextvars.ContextVar: compared with what it holds for the one who steps."""
    return _same_if_alike(snapshot, value, value.get(None), depth)


def record_weak(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """What holds others weakly: compared with what of it lives, of a WeakSet by type."""
    if isinstance(value, weakref.WeakSet):
        kinds = sorted(name_of(type(item)) for item in value)
        return [Tag.SAME, name_of(type(value)), f"{len(kinds)} of {', '.join(kinds)}"]
    return _same_if_alike(snapshot, value, list(value.items()), depth)


def _same_if_alike(snapshot: Snapshot, value: Any, held: Any, depth: int) -> Any:
    node = Snapshot(snapshot.stepped, is_apart=True).node(held, depth + 1)
    if _is_untold(node):
        return [Tag.REFUSED, f"holds a {type(held).__qualname__}, which cannot be told"]
    return [Tag.SAME, name_of(type(value)), xxhash.xxh3_64_hexdigest(pack(node))]


def record_exception(snapshot: Snapshot, value: BaseException, depth: int) -> Any:
    """An exception that was kept: compared with what it says."""
    return [Tag.SAME, name_of(type(value)), str(value)]


_CLOSED = {
    name_of(kind): make
    for kind, make in {
        io.TextIOWrapper: lambda: io.TextIOWrapper(io.BytesIO()),
        io.BufferedReader: lambda: io.BufferedReader(io.BytesIO()),
        io.BufferedWriter: lambda: io.BufferedWriter(io.BytesIO()),
        io.BufferedRandom: lambda: io.BufferedRandom(io.BytesIO()),  # type: ignore[arg-type]
        io.StringIO: io.StringIO,
        io.BytesIO: io.BytesIO,
    }.items()
}


def restore_closed(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """A file that is closed: `with open(...) as file` leaves its name behind."""
    if getattr(live, "closed", False) is True and name_of(type(live)) == node[1]:
        return live
    if node[1] not in _CLOSED:
        return restore.refuse(live, f"{name} is a closed {node[1]} in the lost rank, and not here")
    made: Any = _CLOSED[node[1]]()  # type: ignore[no-untyped-call]
    made.close()
    return made


def record_unknown(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """An object of an extension module: compared by a digest of what it would give to pickle, walked by us."""
    try:
        reduced = value.__reduce_ex__(2)
        if isinstance(reduced, str):
            return [Tag.SAME, name_of(type(value)), reduced]
        apart = Snapshot(snapshot.stepped, is_apart=True)
        apart.numbers[id(value)] = 0
        nodes = [apart.node(list(part) if hasattr(part, "__next__") else part, depth + 1) for part in reduced[:5]]
        packed = pack(nodes)
    except Exception:
        return record_not_proved(snapshot, value)
    if apart.blobs or _is_untold(nodes):
        return record_not_proved(snapshot, value, "it holds what cannot be told")
    return [Tag.SAME, name_of(type(value)), xxhash.xxh3_64_hexdigest(packed)]


def _is_untold(node: Any) -> bool:
    if isinstance(node, dict):
        return any(map(_is_untold, node.values()))
    return isinstance(node, list) and (node[:1] in ([Tag.REFUSED], [Tag.NOT_PROVED]) or any(map(_is_untold, node)))
