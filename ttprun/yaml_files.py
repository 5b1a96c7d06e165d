"""YAML files that the user writes: read, and checked against a model, with errors that name the cure."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ttprun.errors import ConfigError, one_line

_Model = TypeVar("_Model", bound=BaseModel)


def read_yaml(path: Path, what: str) -> object:
    """The content of a YAML file; `what` names it in errors. Raises ConfigError."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ConfigError(f"{what} cannot be read ({why})", "give a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML ({one_line(error)})", "correct the file") from None


def validated(
    model: type[_Model], values: Mapping[str, object], where: Callable[[str], str], is_strict: bool
) -> _Model:
    """A model with these values, all of whose keys it knows.

    where       says where the user finds a key
    is_strict   values have their types already

    Raises ConfigError for a key that is missing, and for the first value that is not valid.
    """
    try:
        return model.model_validate(dict(values), strict=is_strict)
    except ValidationError as error:
        first = error.errors()[0]
        key, *inside = map(str, first["loc"])
        items = filter(str.isdecimal, inside) if is_strict else ()  # in a text the user has not numbered them
        about, place = model.model_fields[key].description, ".".join([where(key), *items])
        if first["type"] == "missing":
            raise ConfigError(f"{place}: missing", f"add it ({about})") from None
        if first["type"] == "value_error":  # from a validator of ours, which writes "what; cure"
            what, _, cure = str(first["ctx"]["error"]).rpartition("; ")
            raise ConfigError(f"{place}: {what}", cure) from None
        rule = first["msg"].replace("Input should", "it should").replace("String should", "it should")
        raise ConfigError(f"{place}: {first['input']!r} is not valid", f"{rule} ({about})") from None


def parse_yaml(text: str) -> object:
    """Parse YAML without its sexagesimal numbers, in which `nnodes: 1:4` is 64. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    """SafeLoader less the numbers with colons."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (a class attribute of yaml's, copied so that yaml's own stays whole)
        first: [rule for rule in rules if rule[0] not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
