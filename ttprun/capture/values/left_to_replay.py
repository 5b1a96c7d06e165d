"""Objects that a replay makes again, or that cannot change the training: only their type is compared.

Two tables, each with a reason for the names: effects, which only go outside, and objects that are fixed when made. A
name is a module, a package with all its modules, or one class. Everything else that can change is recorded, compared by
value, or named as not proved (not_proved.py); a third table names objects whose state no record can reach.
"""

from __future__ import annotations

from ttprun.capture.values.type_names import name_of

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
        os posix shutil tempfile io _io zipfile tarfile gzip bz2.BZ2File lzma.LZMAFile mmap select selectors
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
        torch.utils torch.amp torch.export""",
    "is ttprun's own": "ttprun",
}
# ... except these, which have state: communication hooks with error feedback, averagers that count steps.
_RECORDED = "torch.distributed.algorithms"
ELSEWHERE = {
    "its state is shared with other processes": "multiprocessing.shared_memory multiprocessing.managers",
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
    return _LEFT.get(_found(kind), "")


def why_out_of_reach(kind: type) -> str:
    """Why no record holds the state of objects of this type; "" if one can."""
    return _ELSEWHERE.get(_found(kind), "")


def _found(kind: type) -> str:
    """The entry of the tables for a type: the longest one decides."""
    name = name_of(kind).replace(":", ".")
    while name and name not in _NAMED:
        name = name.rpartition(".")[0]
    return name
