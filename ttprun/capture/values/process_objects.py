"""Objects of the process: files, queues and threads, and what a replay makes again by itself.

A file is set to its position. A queue gets its items back; but a thread or process of the script that fills it starts
again in a replacement, and its progress is unknown. A queue that the main thread fills and only another thread reads (a
log, a tracker) is an effect, and its items are left alone: at a fault a few entries may be missing from the log, or be
there twice.

Of other objects, only the type is compared, or a digest. Two tables name them, each with a reason: effects, which only
go outside, and objects that are fixed when made. A name is a module, a package with all its modules, or one class.
Everything else that can change is recorded, compared by value, or named as not proved (gaps.py); a third table names
objects whose state no record can reach.
"""

from __future__ import annotations

import io
import multiprocessing.process
import threading
import weakref
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED
from typing import Any

import xxhash

from ttprun.capture.records.nodes import (
    ClosedNode,
    EffectNode,
    FileNode,
    Node,
    NotProvedNode,
    RefusedNode,
    SameNode,
    SaveNode,
    WeakNode,
)
from ttprun.capture.records.packing import MISSING, name_of, pack, short_name
from ttprun.capture.values import objects
from ttprun.capture.values.plain import decode
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot, traces
from ttprun.capture.values.trees import walk
from ttprun.introspect import current_rank
from ttprun.introspect.ownership import is_script_code
from ttprun.introspect.safe_reads import attributes_of, done_future, given_up, is_a, plain_of, what_of_future
from ttprun.protocol.reason import pointer

EFFECTS = {
    "shows the progress of the training": """
        tqdm rich colorama alive_progress progressbar
        lightning.pytorch.callbacks.progress pytorch_lightning.callbacks.progress""",
    "is only written to": """
        logging loguru structlog absl.logging
        tensorboard tensorboardX torch.utils.tensorboard wandb mlflow comet_ml neptune clearml aim swanlab""",
    "measures the process": """
        psutil pynvml cProfile pstats profile timeit tracemalloc torch.profiler torch.autograd.profiler torch.monitor
        torch.utils.flop_counter torch.utils.benchmark""",
    "draws pictures": "matplotlib",
}
FIXED = {
    "belongs to the running code, and the replay runs the same": """
        _thread threading multiprocessing.synchronize contextlib _contextvars contextvars""",
    "is started again by the replay, and gets whole pieces of work": "concurrent multiprocessing",
    "describes something once: a parser, a pattern, a type, a format": """
        argparse absl.flags optparse getopt csv _csv json _json abc typing types inspect importlib _frozen_importlib
        _frozen_importlib_external operator _operator zipimport string struct _struct warnings traceback gc pdb bdb
        unittest doctest time atexit platform locale gettext textwrap pprint reprlib dis tokenize code codeop site sys
        __future__ codecs _codecs encodings functools signal weakref _weakref _weakrefset re._parser re._compiler
        click typer fire attr attrs pydantic_core jsonargparse hydra yaml sqlalchemy alembic peewee""",
    "gives access to files or other machines, each request independent": """
        os posix shutil tempfile io _io zipfile tarfile gzip bz2.BZ2File lzma.LZMAFile select selectors
        http urllib ftplib smtplib email xmlrpc socketserver ssl.SSLContext
        requests urllib3 boto3 botocore fsspec huggingface_hub google grpc filelock fasteners portalocker""",
    "is read by name or index, and is the same in each run": """
        h5py lmdb zarr safetensors pyarrow datasets PIL.ImageFont cffi _cffi_backend.FFI _cffi_backend.Lib ctypes.CDLL
        ctypes.PyDLL ctypes.LibraryLoader _ctypes.CFuncPtr ctypes.CDLL.__init__
        ctypes.CFUNCTYPE ctypes.PYFUNCTYPE""",
    "tokenizes text by a table that training does not change": """
        tokenizers tiktoken sentencepiece _sentencepiece""",
    "reads data, and its position is recorded with the loader": """
        webdataset streaming torchdata torch.utils.data""",
    "is made by torch for this process: groups, meshes, streams, graphs": """
        torch._C torch._dynamo torch._inductor torch._functorch torch._ops torch._library torch._jit_internal
        torch._subclasses torch.autograd torch.backends torch.cuda torch.cpu torch.npu torch.xpu torch.mps
        torch.accelerator torch.distributed torch.fx torch.futures torch.hub torch.jit torch.library
        torch.multiprocessing torch.onnx torch.ops torch.overrides torch.package torch.random
        torch.utils torch.amp torch.export torch_npu.npu.graphs""",
    "is ttprun's own": "ttprun",
}
# ... except these, which have state: communication hooks with error feedback, averagers that count steps.
_RECORDED = "torch.distributed.algorithms"
ELSEWHERE = {
    "its state is shared with other processes": """
        multiprocessing.shared_memory multiprocessing.managers multiprocessing.sharedctypes""",
    "it is memory by itself": "mmap torch.UntypedStorage torch.TypedStorage torch.storage",
    "it is another process": "subprocess.Popen",
    "it is a connection to another process or machine": "socket _socket ssl.SSLSocket zmq redis ray",
    "it runs scheduled code": "asyncio _asyncio",
    "its memory belongs to C++ code": "torch.ScriptObject torch._C.ScriptObject",
    "it holds other objects weakly": """
        weakref.WeakKeyDictionary weakref.WeakValueDictionary _weakrefset.WeakSet torch.utils.weak""",
    "how often it was taken is not recorded": """
        threading.Semaphore threading.BoundedSemaphore
        multiprocessing.synchronize.Semaphore multiprocessing.synchronize.BoundedSemaphore""",
    "it holds another value in each context": "_contextvars.ContextVar contextvars.ContextVar",
    "its rows are not recorded": """
        sqlite3.Connection sqlite3.Cursor sqlalchemy.engine sqlalchemy.orm.session sqlalchemy.ext.asyncio
        optuna.storages._rdb optuna.storages._cached_storage optuna.storages.journal optuna.storages._grpc
        peewee.Database psycopg psycopg2 pymysql MySQLdb asyncpg pymongo duckdb""",
}
# Their class is a dictionary's, and what they hold describes something all the same.
DESCRIBING = frozenset({"sqlalchemy.orm.instrumentation:ClassManager"})


def _table(of: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in of.items() for name in names.split()}


_LEFT = _table(EFFECTS) | _table(FIXED)
_ELSEWHERE = _table(ELSEWHERE)
_NAMED = _LEFT | _ELSEWHERE | {_RECORDED: ""}


def why_left(kind: type) -> str:
    """Why objects of this type are left to the replay; "" if they are not."""
    return _LEFT.get(_row_of(kind), "")


def why_out_of_reach(kind: type) -> str:
    """Why no record holds the state of objects of this type; "" if one can."""
    return _ELSEWHERE.get(_row_of(kind), "")


def _row_of(kind: type) -> str:
    """The entry of the tables for a type: the longest one decides."""
    name = name_of(kind).replace(":", ".")
    while name and name not in _NAMED:
        name = name.rpartition(".")[0]
    return name


_DONE = (CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED)  # states of a future


@traces
def record_same(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """Compared by type."""
    snapshot.trace.typed.append(value)
    return SameNode(name_of(type(value)), "")


def record_future(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """Work that another thread or process was given: compared with what it gives, once that is known."""
    if (where := what_of_future(value)) is not None:
        return SaveNode(where, value.done())
    attributes = attributes_of(value)
    if attributes["_state"] not in _DONE:
        return RefusedNode(
            "is work of another thread or process that is not done, and what it will give is not known",
            "work-of-another-thread",
        )
    error, result = attributes["_exception"], attributes["_result"]
    if attributes["_state"] != FINISHED or error is not None:
        what = "cancelled" if error is None else f"{type(error).__qualname__} {_text_of(error)}"
        return SameNode(name_of(type(value)), what)
    node = snapshot.separate_node(result, depth + 1)
    if _is_untold(node):
        return RefusedNode(f"holds a {type(result).__qualname__}, which cannot be recorded")
    return SameNode(name_of(type(value)), xxhash.xxh3_64_hexdigest(pack(node)))


def record_weak_reference(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A weakref.ref, by its referent; one with a callback is compared by type."""
    if value.__callback__ is not None:
        return record_same(snapshot, value, depth)
    referent = value()
    return WeakNode(None if referent is None else snapshot.node(referent, depth + 1))


def restore_weak_reference(restore: Restore, live: Any, node: WeakNode, name: str) -> Any:
    """One to the counterpart of that object."""
    old = live() if type(live) is weakref.ref else MISSING
    if node.referent is None:
        return live if old is None else weakref.ref(set())
    referent = restore.value(old, node.referent, f"{name}()")
    if referent is MISSING:
        return restore.refuse(live, f"{name} refers to an object that is not in the replacement")
    return live if referent is old else weakref.ref(referent)


def record_exception(snapshot: Snapshot, value: BaseException, depth: int) -> Any:
    """An exception that was kept: compared with what it says."""
    return SameNode(name_of(type(value)), _text_of(value))


def _text_of(error: BaseException) -> str:
    """What an exception says, as far as that is not up to the script's own objects."""
    arguments = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    return " ".join(str(plain_of(argument)) for argument in arguments if is_a(argument, (int, float, str, bytes)))


def restore_closed(restore: Restore, live: Any, node: ClosedNode, name: str) -> Any:
    """A closed file, which `with open(...) as file` leaves in a variable. Any closed file matches."""
    if getattr(live, "closed", False) is True:
        return live
    made = io.BytesIO()
    made.close()
    return made


def record_unknown(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """An object of an extension module: compared by a digest of what it would give to pickle, walked by us."""
    try:
        reduced = value.__reduce_ex__(2)
        if isinstance(reduced, str):
            return SameNode(name_of(type(value)), reduced)
        separate = Snapshot(snapshot.stepped, is_separate=True)
        separate.numbers[id(value)] = 0
        nodes = [separate.node(list(part) if hasattr(part, "__next__") else part, depth + 1) for part in reduced[:5]]
        packed = pack(nodes)
    except Exception:
        return snapshot.unproved(type(value))
    if separate.blobs or any(map(_is_untold, nodes)):
        return snapshot.unproved(type(value), "its content cannot be recorded")
    return SameNode(name_of(type(value)), xxhash.xxh3_64_hexdigest(packed))


def record_file_in_memory(snapshot: Snapshot, value: io.StringIO | io.BytesIO, depth: int) -> Any:
    """A file in memory: compared by what it holds, since no program was met that changes one in its steps."""
    return ClosedNode(name_of(type(value))) if value.closed else record_unknown(snapshot, value, depth)


def _is_untold(node: Node) -> bool:
    return any(isinstance(part, RefusedNode | NotProvedNode) for part, _ in walk(node, ""))


def restore_save(restore: Restore, live: Any, node: SaveNode, name: str) -> Any:
    """A future that is done."""
    session = current_rank.current()
    if session is not None and restore.is_comparing and not node.is_done:
        session.mode.note_not_proved(given_up(node.where) + pointer("save-given-up"))
    return live if what_of_future(live) == node.where and live.done() else done_future(node.where)


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
        return RefusedNode("is a file that is read by next(), which hides its position", "iterator-read-by-next")
    return FileNode(snapshot.number(value), kind, position)


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
        return snapshot.unproved(type(value), "it runs beside the main thread, and how far it is is not known")
    return EffectNode(name_of(type(value)))


def _only_writes(thread: threading.Thread) -> bool:
    queues = [users.reference() for users in list(_users.values()) if thread.ident in users.consumers | users.producers]
    return bool(queues) and all(queue is None or goes_out(queue) for queue in queues)


def record_line(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A queue or pipe between processes."""
    return _refused_if_fed() or record_same(snapshot, value, depth)


def _refused_if_fed() -> RefusedNode | None:
    who = _helpers_of_script()
    why = f"is shared with {who}, and how far that had come is not known"
    return RefusedNode(why, "work-of-another-thread") if who else None


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
