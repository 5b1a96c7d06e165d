"""What all tests share.

Property tests draw the same examples each time, so that a run says something of the change and not of its luck;
`pytest --hypothesis-profile explore tests/recovery` looks for new ones. `--shuffle SEED` runs files, and the tests of
each, in an order that is drawn from the seed.
"""

import hashlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# A shell has what it starts in the background ignore this, and so would whatever the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("same", max_examples=150, derandomize=True, database=None, deadline=None)
settings.register_profile("explore", max_examples=5_000, database=None, deadline=None)
settings.load_profile("same")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """How long it takes on two quiet cores, and how less is had."""
    return [
        "all of it: about 8 minutes on two cores that have nothing else to do",
        "less: a folder (./scripts/test.sh -n 0 tests/recovery), or no whole runs (--ignore=tests/e2e)",
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of all tests."""
    parser.addoption("--shuffle", metavar="SEED", help="run files, and the tests of each, in another order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the order from the seed, so that each worker draws the same."""
    seed = config.getoption("--shuffle")
    if seed is not None:
        items.sort(key=lambda item: [hashlib.md5(f"{seed} {x}".encode()).digest() for x in (item.path, item.nodeid)])


def pytest_make_parametrize_id(config: pytest.Config, val: Any, argname: str) -> str | None:
    """Name a case by what its tuple, list or dictionary holds, not by its place (`faults0`), since lists name it."""
    words = list(_words(val)) if isinstance(val, tuple | list | dict) else [None]
    if None in words:
        return None
    name = " ".join(word for word in words if word is not None) or f"no {argname}"
    return name if name.isprintable() and len(name) <= 160 else None


def _words(value: Any) -> Iterator[str | None]:
    """What a value is made of; None for what has no name that is the same in each run."""
    if isinstance(value, dict):
        for key, one in value.items():
            words = list(_words(one))
            yield None if None in words else f"{key}={' '.join(map(str, words))}"
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _words(one)
    else:
        yield str(value) if isinstance(value, str | int | float | None) else None
