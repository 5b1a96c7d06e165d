"""YAML files that the user writes: read, and checked against a model, with errors that name the cure."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ttprun.errors import ConfigError, all_of, one_line

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

    Raises ConfigError for a key that is missing or whose value is not valid, ConfigErrors for several.
    """
    try:
        return model.model_validate(dict(values), strict=is_strict)
    except ValidationError as error:
        by_place: dict[tuple[str, ...], ConfigError] = {}
        for details in error.errors():
            key, *inside = map(str, details["loc"])
            items = tuple(filter(str.isdecimal, inside))
            # Of several kinds of value that a key may have, the first one is named.
            by_place.setdefault((key, *items), _config_error(model, details, where, key, items if is_strict else ()))
        complaint = all_of([*by_place.values()])
    raise complaint


def _config_error(
    model: type[BaseModel], details: ErrorDetails, where: Callable[[str], str], key: str, items: tuple[str, ...]
) -> ConfigError:
    """What pydantic says of one value. items: its place in a list, where the user has numbered them: not in a text."""
    about, place = model.model_fields[key].description, ".".join([where(key), *items])
    if details["type"] == "missing":
        return ConfigError(f"{place}: missing", f"add it ({about})")
    if details["type"] == "value_error":  # from a validator of ours, which writes "what; cure"
        what, _, cure = str(details["ctx"]["error"]).rpartition("; ")
        return ConfigError(f"{place}: {what}", cure)
    rule = details["msg"].replace("Input should", "it should").replace("String should", "it should")
    return ConfigError(f"{place}: {details['input']!r} is not valid", f"{rule} ({about})")


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
