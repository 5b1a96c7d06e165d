"""How each kind of value is recorded, and each kind of node restored: two tables.

The type itself decides first (EXACT), then the first base that fits (BY_BASE); an object of any other class is recorded
by its attributes or by an adapter, left to the replay (process_objects.py), or named as not proved (gaps.py). Read
EXACT first.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import io
import multiprocessing.connection
import multiprocessing.queues
import operator
import queue
import random
import threading
import types
import weakref

import numpy
import torch

from ttprun.capture.records import nodes
from ttprun.capture.records.packing import name_of
from ttprun.capture.values import (
    adapters,
    arrays,
    containers,
    data_trees,
    gaps,
    iterators,
    large,
    modules,
    objects,
    plain,
    process_objects,
    restore,
    tensors,
)
from ttprun.capture.values.autograd_graphs import Unrecorded
from ttprun.capture.values.restore import RESTORERS, Restorer
from ttprun.capture.values.snapshot import HANDLERS, Handler, Snapshot
from ttprun.introspect import fail_open, model_tensors
from ttprun.introspect.safe_reads import has_dictionary, has_method, slots_of

_OF_THE_INTERPRETER: tuple[type, ...] = (
    object, types.FrameType, types.TracebackType, types.CodeType, types.CellType, types.MappingProxyType,
    types.GenericAlias, types.UnionType, property, staticmethod, classmethod, super,
)  # fmt: skip
# Views of other datasets, which scripts change: indices are added, labels replaced.
_DATASETS: tuple[type, ...] = (
    torch.utils.data.Subset, torch.utils.data.TensorDataset, torch.utils.data.ConcatDataset,
    torch.utils.data.StackDataset,
)  # fmt: skip
EXACT: dict[type, Handler] = {
    list: containers.record_sequence(list),
    tuple: containers.record_tuple,
    dict: containers.record_dict,
    bytes: plain.record_plain("bytes"),
    io.StringIO: process_objects.record_file_in_memory,
    io.BytesIO: process_objects.record_file_in_memory,
    types.ModuleType: objects.record_python_module,
    types.FunctionType: objects.record_function,
    types.BuiltinFunctionType: objects.record_method,
    types.MethodType: objects.record_method,
    types.MethodWrapperType: objects.record_method,
    types.WrapperDescriptorType: objects.record_named,
    types.MethodDescriptorType: objects.record_named,
    types.ClassMethodDescriptorType: objects.record_named,
    fail_open.LikeBuiltin: objects.record_named,
    functools.partial: objects.record_partial,
    functools._lru_cache_wrapper: objects.record_cache,
    operator.methodcaller: process_objects.record_unknown,
    weakref.ref: process_objects.record_weak_reference,
    types.SimpleNamespace: objects.record_object,
    numpy.ndarray: arrays.record_array,
    numpy.memmap: arrays.record_array,
    Unrecorded: tensors.record_unrecorded,
    **dict.fromkeys(_OF_THE_INTERPRETER, process_objects.record_same),
    **{base: plain.record_plain(kind) for base, kind in plain.BASES if kind not in ("enum", "path")},
    **dict.fromkeys(iterators.ITERATORS, iterators.record_iterator),
    **dict.fromkeys(iterators.UNKNOWN_ITERATORS, iterators.record_unknown_iterator),
    **dict.fromkeys(weakref.ProxyTypes, process_objects.record_same),
    **dict.fromkeys(_DATASETS, objects.record_object),
    **dict.fromkeys((type({}.keys()), type({}.values()), type({}.items())), process_objects.record_same),
}

BY_BASE: list[tuple[type, Handler]] = [
    *((base, plain.record_plain(kind)) for base, kind in plain.BASES if kind in ("enum", "path")),
    (type, objects.record_class),
    (types.GenericAlias, process_objects.record_same),
    (torch.Tensor, tensors.record_tensor),
    (torch.jit.ScriptModule, modules.record_traced),
    (torch.nn.Module, modules.record_module),
    (torch.optim.Optimizer, modules.record_optimizer),
    (torch.optim.lr_scheduler.LRScheduler, objects.record_object),
    (torch.amp.grad_scaler.GradScaler, objects.record_object),
    (torch.utils.data.Sampler, objects.record_object),
    (torch.utils.data.DataLoader, objects.record_object),
    (torch.Generator, adapters.record_torch),
    (random.SystemRandom, process_objects.record_same),  # has no state: `entropy` counts what is drawn from it
    (random.Random, adapters.record_python),
    *((kind, adapters.record_numpy) for kind in adapters.OF_NUMPY),
    (numpy.generic, plain.record_plain("numpy scalar")),
    (numpy.dtype, plain.record_plain("numpy dtype")),
    *((base, plain.record_plain("scalar")) for base in (int, float, str, bytes, complex)),
    (numpy.ndarray, arrays.record_other_array),
    (numpy.ufunc, objects.record_named),
    (types.ModuleType, objects.record_python_module),
    (types.GeneratorType, iterators.record_generator),
    (BaseException, process_objects.record_exception),
    (io.IOBase, process_objects.record_file),
    (queue.Queue, process_objects.record_queue),
    (threading.Thread, process_objects.record_thread),
    (multiprocessing.queues.Queue, process_objects.record_line),
    (multiprocessing.queues.SimpleQueue, process_objects.record_line),
    (multiprocessing.connection.Connection, process_objects.record_line),
    (torch.utils.data.dataloader._BaseDataLoaderIter, process_objects.record_same),  # loaders.py records its position
    (list, containers.record_sequence(list)),
    (tuple, containers.record_tuple),
    (set, containers.record_set(set)),
    (frozenset, containers.record_set(frozenset)),
    (collections.deque, containers.record_sequence(collections.deque)),
    (dict, containers.record_dict),
    (argparse.Namespace, objects.record_object),
    (weakref.ReferenceType, process_objects.record_same),
    (concurrent.futures.Future, process_objects.record_future),
    (threading.local, objects.record_object),
]

# Made by the replay, or recorded elsewhere.
objects.leave_out(torch.optim.lr_scheduler.LRScheduler, "optimizer anneal_func _anneal_func_type _scale_fn_ref")
objects.leave_out(torch.amp.grad_scaler.GradScaler, "_per_optimizer_states")
objects.leave_out(torch.utils.data.Sampler, "dataset data_source")
objects.leave_out(torch.utils.data.DataLoader, "_iterator")
objects.leave_out(types.ModuleType, " ".join([*vars(types.ModuleType("")), "__builtins__", "__cached__", "__file__"]))
objects.leave_out(threading.Thread, " ".join(vars(threading.Thread())))

RESTORERS_OF_KINDS: dict[type[nodes.AnyNode], Restorer] = {
    nodes.SameNode: restore.restore_same,
    nodes.NotProvedNode: gaps.restore_by_type,
    nodes.EffectNode: gaps.restore_by_type,
    nodes.RefusedNode: lambda restore, live, node, name: restore.refuse(live, node.reason(name), is_unrecorded=True),
    nodes.ReferenceNode: lambda restore, live, node, name: restore.known(node.number, live, name),
    nodes.PlainNode: plain.restore_plain,
    nodes.IdNode: containers.restore_id,
    nodes.ListNode: containers.restore_list,
    nodes.TupleNode: containers.restore_tuple,
    nodes.SetNode: containers.restore_set,
    nodes.FrozensetNode: containers.restore_frozenset,
    nodes.DequeNode: containers.restore_list,
    nodes.DictNode: containers.restore_dict,
    nodes.StateNode: adapters.restore_state,
    nodes.DataTreeNode: data_trees.restore_data_tree,
    nodes.LongNode: containers.restore_long,
    nodes.ClosedNode: process_objects.restore_closed,
    nodes.SaveNode: process_objects.restore_save,
    nodes.FileNode: process_objects.restore_file,
    nodes.ObjectNode: objects.restore_object,
    nodes.ValueObjectNode: objects.restore_value_object,
    nodes.ClassNode: objects.restore_class,
    nodes.FunctionNode: objects.restore_function,
    nodes.MethodNode: objects.restore_method,
    nodes.WeakNode: process_objects.restore_weak_reference,
    nodes.PartialNode: objects.restore_partial,
    nodes.TensorNode: tensors.restore_tensor,
    nodes.WeightNode: tensors.restore_weight,
    nodes.DataNode: large.compare_data,
    nodes.ChangedDataNode: large.restore_changed_data,
    nodes.ActivationNode: tensors.restore_activation,
    nodes.ShardedNode: tensors.restore_sharded,
    nodes.ModuleNode: modules.restore_module,
    nodes.WrapperNode: modules.restore_wrapper,
    nodes.ArrayNode: arrays.restore_array,
    nodes.ObjectArrayNode: arrays.restore_object_array,
    nodes.RandomNode: adapters.restore_random,
    nodes.NumpyRandomNode: adapters.restore_random,
    nodes.OptimizerNode: modules.restore_optimizer,
    nodes.IteratorNode: iterators.restore_iterator,
    nodes.SuspendedNode: iterators.restore_generator,
    nodes.ExpressionNode: iterators.restore_expression,
}
RESTORERS.update(RESTORERS_OF_KINDS)


def handler_for(kind: type) -> Handler:
    """How values of a type are recorded."""
    if kind in EXACT:
        return EXACT[kind]
    if name_of(kind) in process_objects.DESCRIBING:
        return process_objects.record_same
    adapter = adapters.adapter_for(kind)
    if adapter is not None:
        return adapters.record_with(adapter, kind)
    if model_tensors.kind() is not None and issubclass(kind, model_tensors.kind()):  # type: ignore[arg-type]
        return tensors.record_sharded
    for base, handler in BY_BASE:
        if issubclass(kind, base):
            return handler
    if not objects.is_of_user(kind):
        if process_objects.why_left(kind):
            return iterators.record_unknown_iterator if has_method(kind, "__next__") else process_objects.record_same
        out_of_reach = process_objects.why_out_of_reach(kind)
        if out_of_reach:
            return lambda snapshot, value, depth: snapshot.unproved(type(value), out_of_reach)
    has_attributes = has_dictionary(kind) or bool(slots_of(kind))
    compared = iterators.record_compiled_iterator if has_method(kind, "__next__") else process_objects.record_unknown
    if adapters.hides_state(kind):
        pair = adapters.pair_of(kind)
        return compared if pair is None else _recorded_or_compared(adapters.record_with(pair, kind), compared)
    if has_attributes and objects.is_frozen(kind):
        return objects.record_value_object
    return objects.record_object if has_attributes or objects.is_of_user(kind) else compared


def _recorded_or_compared(record: Handler, compared: Handler) -> Handler:
    """Record an extension's object; if that fails, compare its digest, if it has one."""

    def handle(snapshot: Snapshot, value: object, depth: int) -> object:
        node = record(snapshot, value, depth)
        return node if isinstance(node, nodes.StateNode) else compared(snapshot, value, depth)

    return handle


HANDLERS.choose = handler_for
