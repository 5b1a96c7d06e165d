"""One rank of a conformance run: tests that others wrote, with an optimizer that takes steps in the same process.

    torchrun ... in_rank.py OUT KIND NAME ...       OUT is a folder; gets rank<N>.jsonl, a line for each test

KIND is how the names are run: `unittest` (modules of tests), `pytest` (files, or what pytest takes), `distributed`
(tests of torch's distributed_test, in all ranks at once). Under ttprun each step is a boundary, with every hook in.
Steps are taken by the main thread before and after each test, and within it at its assertions. The loops that go
through the tests are in this file, so that ttprun follows them. Begin with `main`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEP_EVERY = 4  # assertions
MOST_STEPS = 40  # within one test
TEST_LIMIT_S = 90.0  # of a distributed test
BARRIER_LIMIT_S = 60
_PID = os.getpid()
Outcome = tuple[str, str]  # passed, skipped, failed; and the error's last line


class Stepping:
    """A small model whose optimizer takes a step when asked to."""

    def __init__(self) -> None:
        self.weight = torch.ones(8, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.01, momentum=0.9)
        self.steps = self.asked = self.left = 0

    def step(self) -> None:
        """One step, if this is the main thread of the rank itself."""
        if os.getpid() != _PID or threading.current_thread() is not threading.main_thread():
            return
        self.optimizer.zero_grad()
        with torch.random.fork_rng(devices=[]):  # a mode in which a test has left torch is none of ours
            (self.weight * self.weight).sum().backward()
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.all_reduce(self.weight.grad)
        self.optimizer.step()
        self.steps += 1

    def at_assertion(self) -> None:
        """A step at each STEP_EVERY-th call within a test, at most MOST_STEPS."""
        self.asked += 1
        if self.left and self.asked % STEP_EVERY == 0:
            self.left -= 1
            self.step()

    def around(self, test: Callable[[], Outcome]) -> Outcome:
        """Run a test between two steps."""
        self.step()
        self.left = MOST_STEPS
        outcome = test()
        self.left = 0
        self.step()
        return outcome


def step_at(holder: Any, names: Iterator[str], stepping: Stepping) -> None:
    """Have functions of a class or module take a step before they are run, now and then."""
    for name in names:
        setattr(holder, name, _stepping_first(getattr(holder, name), stepping))


def _stepping_first(original: Callable[..., Any], stepping: Stepping) -> Callable[..., Any]:
    def asserting(*args: Any, **kwargs: Any) -> Any:
        stepping.at_assertion()
        return original(*args, **kwargs)

    return asserting


class Noted(unittest.TestResult):
    """What one test of unittest came to."""

    def outcome(self) -> Outcome:
        """Its one outcome; of several subtests that of the first that failed."""
        bad = [*self.errors, *self.failures]
        if bad:
            return "failed", bad[0][1].strip().splitlines()[-1]
        if self.unexpectedSuccesses:
            return "failed", "it was expected to fail"
        return ("skipped", str(self.skipped[0][1])) if self.skipped else ("passed", "")


def tests_of(module: str) -> Iterator[unittest.TestCase]:
    """The tests of a module, one after the other."""
    waiting: list[Any] = [unittest.defaultTestLoader.loadTestsFromName(module)]
    while waiting:
        suite = waiting.pop(0)
        if isinstance(suite, unittest.TestSuite):
            waiting[:0] = list(suite)
        else:
            yield suite


def run_unittest(names: list[str], stepping: Stepping, note: Callable[[str, Outcome], None]) -> None:
    """Modules of unittest, such as those of CPython's own `test` package."""
    from test import support

    support.use_resources = []
    case = unittest.TestCase
    step_at(case, (name for name in dir(case) if name.startswith("assert") and name[6:7].isupper()), stepping)
    for module in names:
        previous: type | None = None
        for test in tests_of(module):
            if type(test) is not previous:
                _leave_class(previous)
                _enter_class(type(test))
                previous = type(test)
            result = Noted()

            def run(test: Any = test, result: Noted = result) -> Outcome:
                test.run(result)
                return result.outcome()

            note(test.id(), stepping.around(run))
        _leave_class(previous)


def _enter_class(kind: type) -> None:
    """What unittest's own suites do between the tests of two classes and modules."""
    module = sys.modules.get(kind.__module__)
    if module is not None and not getattr(module, "_is_set_up", False):
        module._is_set_up = True  # type: ignore[attr-defined]
        getattr(module, "setUpModule", lambda: None)()
    with contextlib.suppress(unittest.SkipTest):
        getattr(kind, "setUpClass", lambda: None)()


def _leave_class(kind: type | None) -> None:
    getattr(kind, "tearDownClass", lambda: None)()
    getattr(kind, "doClassCleanups", lambda: None)()


def run_pytest(names: list[str], stepping: Stepping, note: Callable[[str, Outcome], None]) -> None:
    """Tests that pytest collects; each function is called from here, not from pytest's own loops."""
    import numpy.testing
    import pytest
    from _pytest.config import _prepareconfig
    from _pytest.main import Session

    step_at(numpy.testing, (name for name in dir(numpy.testing) if name.startswith("assert_")), stepping)
    config = _prepareconfig(["-q", "-p", "no:cacheprovider", "--pyargs", *names])
    config._do_configure()
    session = Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    items = session.perform_collect()
    for at, item in enumerate(items):
        following = items[at + 1] if at + 1 < len(items) else None

        def run(item: Any = item, following: Any = following) -> Outcome:
            try:
                for mark in item.iter_markers("xfail"):
                    return "skipped", f"xfail {mark.args}"
                item.config.hook.pytest_runtest_setup(item=item)
                item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
                outcome = ("passed", "")
            except pytest.skip.Exception as skip:
                outcome = ("skipped", str(skip))
            except Exception as error:
                outcome = ("failed", _line(error))
            with contextlib.suppress(Exception):
                item.session._setupstate.teardown_exact(following)
            return outcome

        note(item.nodeid, stepping.around(run))


def run_distributed(names: list[str], stepping: Stepping, note: Callable[[str, Outcome], None], out: Path) -> None:
    """Tests of torch's distributed_test, each in all ranks at once, as its own processes run them."""
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed import distributed_test as theirs

    class Tests(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        pass

    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    rank = int(os.environ["RANK"])
    watch = _Watch(out, rank)
    barrier = Tests._barrier

    def step_and_wait(self: Any, *args: Any, **kwargs: Any) -> None:
        stepping.step()
        barrier(self, *args, **{"timeout": BARRIER_LIMIT_S, **kwargs})

    Tests._barrier = step_and_wait
    for number, name in enumerate(names):
        if not hasattr(Tests, name):
            note(name, ("skipped", "this build of torch has no such test"))
            continue
        test = Tests(name)
        theirs.Barrier.barrier_id = number * 1000  # ranks that have failed at different ones meet again
        test.rank, test.file_name = rank, str(out / f"store-{name}")

        def run(test: Any = test, name: str = name, number: int = number) -> Outcome:
            timeout = timedelta(seconds=theirs.CUSTOM_PG_TIMEOUT.get(name, theirs.default_pg_timeout))
            dist.init_process_group("gloo", test.init_method, timeout, int(test.world_size), rank)
            test._barrier()
            outcome = ("passed", "")
            try:
                getattr(test, name)()
            except SystemExit as end:
                outcome = ("skipped", str(skips.get(end.code, end.code)))  # type: ignore[call-overload]
            except unittest.SkipTest as skip:
                outcome = ("skipped", str(skip))
            except Exception as error:
                outcome = ("failed", _line(error))
                if not watch.has_failed_everywhere(name, int(test.world_size)):
                    watch.give_up(lambda: note(name, outcome))
                theirs.Barrier.barrier_id = number * 1000 + 500
            test._barrier()
            dist.destroy_process_group()
            return outcome

        late = ("failed", f"not over after {TEST_LIMIT_S:.0f} s, or it has failed in another rank")
        with watch.limit(partial(note, name, late)):
            outcome = run()
        note(name, outcome)


class _Watch:
    """Ends this rank when its test takes too long, or has failed in another rank, which then waits for nobody."""

    def __init__(self, out: Path, rank: int) -> None:
        self._failed, self._rank = out / "failed", rank
        self._ends_s, self._last_words = float("inf"), lambda: None
        threading.Thread(target=self._look, daemon=True).start()

    @contextlib.contextmanager
    def limit(self, last_words: Callable[[], None]) -> Iterator[None]:
        """For a test; `last_words` is called if it is not over in time."""
        self._last_words, self._ends_s = last_words, time.monotonic() + TEST_LIMIT_S
        yield
        self._ends_s = float("inf")

    def has_failed_everywhere(self, name: str, ranks: int) -> bool:
        """Whether all ranks say so within a moment: then none waits for another, and they can go on."""
        (self._failed.parent / f"failed-{name}-{self._rank}").touch()
        for _ in range(20):
            if len(list(self._failed.parent.glob(f"failed-{name}-*"))) == ranks:
                return True
            time.sleep(0.5)
        return False

    def give_up(self, last_words: Callable[[], None]) -> None:
        """This rank's test has failed: no rank can go on."""
        last_words()
        self._failed.touch()
        os._exit(0)

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            if self._failed.exists() or time.monotonic() > self._ends_s:
                time.sleep(1.0)  # a rank that fails by itself says why
                self.give_up(self._last_words)


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def main() -> None:
    """Run all tests that are named, and note what each came to."""
    out, kind, *names = sys.argv[1:]
    place = Path(out)
    notes = open(place / f"rank{os.environ['RANK']}.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    stepping = Stepping()

    def note(test: str, outcome: Outcome) -> None:
        notes.write(
            json.dumps({"test": test, "outcome": outcome[0], "detail": outcome[1][:300], "steps": stepping.steps})
            + "\n"
        )

    sys.argv[1:] = []
    if kind == "distributed":
        run_distributed(names, stepping, note, place)
    else:
        dist.init_process_group("gloo")
        {"unittest": run_unittest, "pytest": run_pytest}[kind](names, stepping, note)
        dist.destroy_process_group()
    note("", ("ended", ""))


if __name__ == "__main__":
    main()
