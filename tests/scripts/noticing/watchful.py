"""Objects that notice every look at them, in every form in which a program can hold one."""

import array
import collections
import concurrent.futures
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import operator
import os
import pathlib
import queue
import random
import sys
import threading
import traceback
import types
import weakref

seen = collections.Counter()
_OPERATIONS = """
    __getattribute__ __len__ __iter__ __next__ __reversed__ __contains__ __getitem__ __eq__ __ne__ __hash__ __bool__
    __repr__ __str__ __format__ __bytes__ __sizeof__ __dir__ __reduce__ __reduce_ex__ __getstate__ __copy__ __deepcopy__
    __fspath__ __index__ __int__ __float__ __array__ __buffer__ __call__ __enter__ __torch_function__ __instancecheck__
    items keys values get copy state_dict __getnewargs_ex__ __lt__ __missing__ __length_hint__ __dataclass_fields__
    shape dtype data_ptr numpy parameters named_parameters modules named_modules buffers children train epoch generator
""".split()


def note(place, operation):
    seen[f"{place}: {operation}"] += 1
    if os.environ.get("SHOW_LOOKS"):  # for a person who wants to know who looks
        found = "".join(traceback.format_stack(sys._getframe(2), 9))
        print(f"LOOK {place} {operation}\n{found}", file=sys.stderr)


def place_of(one):
    return type.__getattribute__(type(one), "place")


def _method(base, name):
    original = getattr(base, name, None)

    def look(self, *args, **kwargs):
        note(place_of(self), f"{name} {args[0]}" if name == "__getattribute__" else name)
        if original is None:
            raise AttributeError(name)
        return original(self, *args, **kwargs)

    return look


def kind(base, place, operations=_OPERATIONS):
    """A class of objects that notice every look, and act as those of `base` do."""
    methods = {name: _method(base, name) for name in operations if name[:2] == "__" and hasattr(base, name)}
    methods["__getattribute__"] = _method(base, "__getattribute__")
    if base is object:
        methods |= {name: _method(base, name) for name in ("__len__", "__iter__", "__getitem__", "__bool__", "items")}
        methods["__getattr__"] = _method(base, "__getattr__")
    else:
        methods |= {name: _method(base, name) for name in operations if name[:2] != "__" and hasattr(base, name)}
    methods["__class__"] = property(lambda self: note(place, "__class__") or type(self))
    methods["lazy"] = property(lambda self: note(place, "a property"))
    methods.pop("__reduce__", None)
    return type("Watchful" + base.__name__.capitalize(), (base,), methods | {"place": place, "__module__": __name__})


def one(place):
    return object.__new__(kind(object, place))


class WatchfulType(type):
    """A class of classes that notice every look at them."""

    def __getattribute__(cls, name):
        note("metaclass", f"__getattribute__ {name}")
        return type.__getattribute__(cls, name)

    def __getattr__(cls, name):
        note("metaclass", f"__getattr__ {name}")
        raise AttributeError(name)

    @property
    def __dict__(cls):
        note("metaclass", "__dict__")
        return type.__dict__["__dict__"].__get__(cls)

    def __instancecheck__(cls, value):
        note("metaclass", "__instancecheck__")
        return type.__instancecheck__(cls, value)

    def __subclasscheck__(cls, kind):
        note("metaclass", "__subclasscheck__")
        return type.__subclasscheck__(cls, kind)


class OfWatchfulType(metaclass=WatchfulType):
    table = [1, 2]

    def __init__(self):
        self.held = 1


class Color(enum.Enum):
    RED = 1

    @property
    def shade(self):
        note("enum", "a property")


@dataclasses.dataclass(frozen=True)
class Frozen:
    held: object
    number: int

    @property
    def lazy(self):
        note("frozen", "a property")


class Cached:
    @functools.cached_property
    def loaded(self):
        note("cached", "loaded")

    def __getattr__(self, name):
        note("cached", f"__getattr__ {name}")
        raise AttributeError(name)


class Slotted:
    __slots__ = ("held",)


class Owner:
    """A plain object of the script's."""

    of_class = None

    def method(self):
        return self


def everything(where):
    """name -> a value that holds watchful objects, or is one."""
    each = {}
    each["direct"] = one(f"{where}.direct")
    each["in_list"] = [one(f"{where}.in_list")]
    each["in_tuple"] = (one(f"{where}.in_tuple"), 1)
    each["in_dict"] = {"a": one(f"{where}.in_dict"), one(f"{where}.key"): 1}
    each["in_set"] = {one(f"{where}.in_set")}
    each["in_frozenset"] = frozenset({one(f"{where}.in_frozenset")})
    each["in_deque"] = collections.deque([one(f"{where}.in_deque")])
    each["in_defaultdict"] = collections.defaultdict(list, a=one(f"{where}.in_defaultdict"))
    each["in_ordered"] = collections.OrderedDict(a=one(f"{where}.in_ordered"))
    each["in_counter"] = collections.Counter({"a": 1})
    each["list_kind"] = kind(list, f"{where}.list_kind")([1, 2, one(f"{where}.in_list_kind")])
    each["dict_kind"] = kind(dict, f"{where}.dict_kind")({"a": 1, "b": one(f"{where}.in_dict_kind")})
    each["set_kind"] = kind(set, f"{where}.set_kind")({1, 2})
    each["frozenset_kind"] = kind(frozenset, f"{where}.frozenset_kind")({1, 2})
    each["tuple_kind"] = kind(tuple, f"{where}.tuple_kind")((1, one(f"{where}.in_tuple_kind")))
    each["deque_kind"] = kind(collections.deque, f"{where}.deque_kind")([1, one(f"{where}.in_deque_kind")])
    each["ordered_kind"] = kind(collections.OrderedDict, f"{where}.ordered_kind")({"a": 1})
    each["defaultdict_kind"] = kind(collections.defaultdict, f"{where}.defaultdict_kind")(None, {"a": 1})
    each["userdict_kind"] = kind(collections.UserDict, f"{where}.userdict_kind")({"a": 1})
    each["int_kind"] = kind(int, f"{where}.int_kind")(3)
    each["str_kind"] = kind(str, f"{where}.str_kind")("three")
    each["float_kind"] = kind(float, f"{where}.float_kind")(3.5)
    each["bytes_kind"] = kind(bytes, f"{where}.bytes_kind")(b"three")
    each["bytearray_kind"] = kind(bytearray, f"{where}.bytearray_kind")(b"three")
    each["module_kind"] = kind(types.ModuleType, f"{where}.module_kind")("lazy_module")
    each["namespace_kind"] = kind(types.SimpleNamespace, f"{where}.namespace_kind")(a=1)
    each["exception_kind"] = kind(ValueError, f"{where}.exception_kind")("text")
    each["random_kind"] = kind(random.Random, f"{where}.random_kind")(3)
    each["queue_kind"] = kind(queue.Queue, f"{where}.queue_kind")()
    each["stream_kind"] = kind(io.StringIO, f"{where}.stream_kind")("text")
    each["writer_kind"] = kind(io.TextIOBase, f"{where}.writer_kind")()
    each["datetime_kind"] = kind(datetime.datetime, f"{where}.datetime_kind")(2020, 1, 1)
    each["fraction_kind"] = kind(fractions.Fraction, f"{where}.fraction_kind")
    each["path_kind"] = kind(type(pathlib.Path()), f"{where}.path_kind")("/nowhere")
    each["partial_kind"] = kind(functools.partial, f"{where}.partial_kind")(print, 1)
    each["thread_kind"] = kind(threading.Thread, f"{where}.thread_kind")
    each["array_kind"] = kind(array.array, f"{where}.array_kind")("i", [1, 2])
    each["decimal_kind"] = kind(decimal.Decimal, f"{where}.decimal_kind")("1.5")
    each["complex_kind"] = kind(complex, f"{where}.complex_kind")(1, 2)
    each["property_kind"] = kind(property, f"{where}.property_kind")()
    each["future_kind"] = kind(concurrent.futures.Future, f"{where}.future_kind")()
    each["weak_kind"] = weakref.WeakValueDictionary()
    each["chain"] = collections.ChainMap({"a": one(f"{where}.chain")})
    each["counting"] = itertools.count(1)
    each["cycle"] = itertools.cycle([one(f"{where}.cycle")])
    each["mapped"] = map(print, [one(f"{where}.mapped")])
    each["enumerated"] = enumerate([one(f"{where}.enumerated")] * 3)
    each["getter"] = operator.attrgetter("held")
    each["proxied"] = types.MappingProxyType({"a": one(f"{where}.proxied")})
    each["view"] = {"a": one(f"{where}.view")}.items()
    each["weak"] = weakref.ref(each["direct"])
    each["color"] = Color.RED
    each["frozen"] = Frozen(one(f"{where}.frozen"), 1)
    each["cached"] = Cached()
    each["thread_local"] = threading.local()
    each["thread_local"].held = one(f"{where}.thread_local")
    owner, slotted = Owner(), Slotted()
    owner.held = one(f"{where}.attribute")
    owner.kinds = [
        kind(dict, f"{where}.attribute.dict_kind")({"a": 1}),
        kind(list, f"{where}.attribute.list_kind")([1]),
    ]
    slotted.held = one(f"{where}.slot")
    each |= {"owner": owner, "slotted": slotted, "bound": owner.method}
    each["namespace"] = types.SimpleNamespace(held=one(f"{where}.namespace"))
    each["partial"] = functools.partial(print, one(f"{where}.partial"), end=one(f"{where}.partial_keyword"))
    cell = one(f"{where}.cell")
    each["closure"] = lambda given=one(f"{where}.default"), *, other=one(f"{where}.keyword_default"): (cell, given)
    each["closure"].attribute = one(f"{where}.function_attribute")

    def generator(inside):
        for number in range(10**6):
            yield number, inside

    each["generator"] = generator(one(f"{where}.generator"))
    next(each["generator"])
    each["iterator"] = iter([one(f"{where}.iterator")] * 10)
    each["zipped"] = zip([one(f"{where}.zipped")] * 10, range(10), strict=False)
    each["class_kind"], each["of_class_kind"] = OfWatchfulType, OfWatchfulType()
    each["error"] = ValueError(one(f"{where}.error"))
    return each


Owner.of_class = one("class attribute")
elsewhere = everything("another module")
