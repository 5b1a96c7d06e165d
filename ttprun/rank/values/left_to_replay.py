"""What a replay makes again by itself, or what cannot change the training: of these objects only the type is compared.

Two tables, each with the reason beside the names: effects, which only go out, and what is fixed when it is made. A name
is a module, a package with all below it, or one class. Everything else that can change is recorded, compared by value,
or named as not proved (not_proved.py); a third table names what keeps its state where no record reaches it.
"""

from __future__ import annotations

EFFECTS = {
    "shows how far the training has come": """
        tqdm rich colorama alive_progress progressbar
        lightning.pytorch.callbacks.progress pytorch_lightning.callbacks.progress""",
    "is written to, and nothing of it comes back into the training": """
        logging loguru structlog absl.logging
        tensorboard tensorboardX torch.utils.tensorboard wandb mlflow comet_ml neptune clearml aim swanlab""",
    "measures the process": """
        psutil pynvml cProfile pstats profile timeit tracemalloc torch.profiler torch.autograd.profiler torch.monitor
        torch.utils.flop_counter torch.utils.benchmark""",
    "draws pictures": "matplotlib",
}
FIXED = {
    "is held by whoever's code is running, and the replay runs the same": """
        _thread threading multiprocessing.synchronize contextlib _contextvars contextvars""",
    "starts anew with the replay, and is given whole pieces of work": "concurrent multiprocessing",
    "describes something once: a parser, a pattern, a type, a format": """
        argparse absl.flags optparse getopt csv _csv json _json abc typing types inspect importlib _frozen_importlib
        _frozen_importlib_external operator _operator zipimport string struct _struct warnings traceback gc pdb bdb
        unittest doctest time atexit platform locale gettext textwrap pprint reprlib dis tokenize code codeop site sys
        __future__ codecs _codecs encodings functools signal weakref _weakref _weakrefset re._parser re._compiler
        click typer fire attr attrs pydantic_core jsonargparse hydra yaml""",
    "is a way to files or to other machines, and each request is whole": """
        os posix shutil tempfile io _io zipfile tarfile gzip bz2.BZ2File lzma.LZMAFile mmap select selectors
        http urllib ftplib smtplib email xmlrpc socketserver ssl.SSLContext
        requests urllib3 boto3 botocore fsspec huggingface_hub google grpc""",
    "is read by name or index, and is the same in each run": """
        h5py lmdb zarr safetensors pyarrow datasets PIL.ImageFont cffi _cffi_backend.FFI _cffi_backend.Lib ctypes.CDLL
        ctypes.PyDLL ctypes.LibraryLoader _ctypes.CFuncPtr ctypes.CDLL.__init__
        ctypes.CFUNCTYPE ctypes.PYFUNCTYPE""",
    "cuts text into tokens by a table that training does not change": """
        tokenizers tiktoken sentencepiece _sentencepiece""",
    "reads data, and how far it has come is recorded with the loader": """
        webdataset streaming torchdata torch.utils.data""",
    "is made by torch for this process: groups, meshes, streams, graphs": """
        torch._C torch._dynamo torch._inductor torch._functorch torch._ops torch._library torch._jit_internal
        torch._subclasses torch.autograd torch.backends torch.cuda torch.cpu torch.npu torch.xpu torch.mps
        torch.accelerator torch.distributed torch.fx torch.futures torch.hub torch.jit torch.library
        torch.multiprocessing torch.onnx torch.ops torch.overrides torch.package torch.random
        torch.utils torch.amp torch.export""",
    "is ttprun's own": "ttprun",
}
# ... but for these, which train: communication hooks with error feedback, averagers that count steps.
_RECORDED = "torch.distributed.algorithms"
ELSEWHERE = {
    "its state is shared with other processes": "multiprocessing.shared_memory multiprocessing.managers",
    "it is another process": "subprocess.Popen",
    "it is a connection to another process or machine": "socket _socket ssl.SSLSocket zmq redis",
    "it runs whatever is scheduled on it": "asyncio _asyncio",
    "it is memory that C looks after": "torch.ScriptObject torch._C.ScriptObject",
    "it holds others weakly": """
        weakref.WeakKeyDictionary weakref.WeakValueDictionary _weakrefset.WeakSet torch.utils.weak""",
    "how often it was taken is not recorded": """
        threading.Semaphore threading.BoundedSemaphore
        multiprocessing.synchronize.Semaphore multiprocessing.synchronize.BoundedSemaphore""",
    "it holds another value in each context": "_contextvars.ContextVar contextvars.ContextVar",
    "its rows are not recorded": "sqlite3.Connection sqlite3.Cursor",
}


def _table(of: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in of.items() for name in names.split()}


_LEFT = _table(EFFECTS) | _table(FIXED)
_ELSEWHERE = _table(ELSEWHERE)
_TOLD = _LEFT | _ELSEWHERE | {_RECORDED: ""}


def why_left(kind: type) -> str:
    """Why objects of this type are left to the replay; "" if they are not."""
    return _LEFT.get(_found(kind), "")


def why_out_of_reach(kind: type) -> str:
    """Why no record holds the state of objects of this type; "" if one can."""
    return _ELSEWHERE.get(_found(kind), "")


def _found(kind: type) -> str:
    """The entry of the tables for a type: the longest one decides."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    while name and name not in _TOLD:
        name = name.rpartition(".")[0]
    return name
