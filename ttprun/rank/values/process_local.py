"""What only means something in its own process, or does not change, and which a replay makes again by itself.

Of these only the type is compared. Everything in these lists is there on purpose: an object that could carry the state
of a training must not be; so iterators of these types are refused (kinds.py). A file that is closed can be made again.
"""

from __future__ import annotations

import io
from typing import Any

import xxhash

from ttprun.rank.values.nodes import Tag, name_of, pack
from ttprun.rank.values.restore import Restore
from ttprun.rank.values.snapshot import Snapshot

# Modules and packages whose objects are left to the replay: the name itself, and whatever is below it.
# The standard library: threads and processes, files and sockets, logging, parsers, what is fixed when it is made.
_STANDARD = """
    _thread threading _threading_local multiprocessing _multiprocessing concurrent asyncio _asyncio subprocess
    signal socket _socket ssl _ssl select selectors socketserver http urllib ftplib smtplib email xmlrpc io _io
    codecs _codecs encodings os posix shutil tempfile mmap zipfile tarfile gzip bz2 _bz2 lzma _lzma zlib logging
    argparse optparse getopt csv _csv json _json pickle _pickle sqlite3 _sqlite3 dbm shelve contextlib contextvars
    _contextvars weakref _weakref _weakrefset abc typing types inspect importlib _frozen_importlib
    _frozen_importlib_external zipimport re functools operator _operator string struct _struct warnings traceback gc
    pdb bdb unittest doctest timeit cProfile pstats profile time atexit sched platform ctypes _ctypes locale gettext
    textwrap pprint reprlib dis ast tokenize code codeop site sys __future__
"""
# torch: groups and meshes, streams and graphs, profilers, datasets and what reads them.
_TORCH = """
    torch._C torch._dynamo torch._inductor torch._functorch torch._ops torch._library torch._jit_internal
    torch._subclasses torch.autograd torch.backends torch.cuda torch.cpu torch.npu torch.xpu torch.mps
    torch.accelerator torch.distributed torch.fx torch.futures torch.hub torch.jit torch.library
    torch.multiprocessing torch.nn torch.onnx torch.ops torch.overrides torch.package torch.profiler torch.random
    torch.storage torch.utils torch.amp torch.export torch.monitor ttprun
"""
# Widely used libraries: displays and trackers, tokenizers, datasets, images and files, configurations.
_LIBRARIES = """
    tqdm rich tensorboard tensorboardX wandb mlflow comet_ml neptune clearml aim swanlab loguru structlog absl
    colorama tokenizers tiktoken sentencepiece _sentencepiece datasets pyarrow h5py lmdb zarr webdataset streaming
    torchdata torchvision torchaudio PIL cv2 albumentations matplotlib psutil pynvml cffi _cffi_backend omegaconf
    hydra yacs ml_collections yaml click typer fire attr attrs pydantic pydantic_core jsonargparse huggingface_hub
    safetensors fsspec boto3 botocore redis zmq grpc google requests urllib3 aiohttp
"""
REPRODUCED = frozenset((_STANDARD + _TORCH + _LIBRARIES).split())
# But for these, which train: communication hooks with error feedback, averagers that count steps.
_RECORDED = frozenset({"torch.distributed.algorithms"})


def is_reproduced(kind: type) -> bool:
    """Whether objects of this type are left to the replay."""
    name = kind.__module__
    while name:
        if name in REPRODUCED or name in _RECORDED:
            return name in REPRODUCED
        name = name.rpartition(".")[0]
    return False


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


def _same_if_alike(snapshot: Snapshot, value: Any, held: Any, depth: int) -> Any:
    node = Snapshot(snapshot.stepped, is_apart=True).node(held, depth + 1)
    if _is_refused(node):
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
        nodes = [apart.node(list(part) if hasattr(part, "__next__") else part, depth + 1) for part in reduced[1:5]]
        packed = pack(nodes)
    except Exception as error:
        return [Tag.REFUSED, f"is a {type(value).__qualname__}, which cannot be told ({error})"]
    if apart.blobs or _is_refused(nodes):
        return [Tag.REFUSED, f"is a {type(value).__qualname__}, which holds what cannot be told"]
    return [Tag.SAME, name_of(type(value)), xxhash.xxh3_64_hexdigest(packed)]


def _is_refused(node: Any) -> bool:
    if isinstance(node, dict):
        return any(map(_is_refused, node.values()))
    return isinstance(node, list) and (node[:1] == [Tag.REFUSED] or any(map(_is_refused, node)))
