"""Objects of common packages, in use at each step: no record walks through them again and again."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from ttprun.capture import values
from ttprun.capture.values import kept, snapshot

BOUNDARIES = 12
MOST_NODES = 60  # in the record of a step after the tenth
NOTHING: dict[int, int] = {}
Counted = tuple[int, list[kept.Price], list[str]]  # nodes made by a walk, what each variable took, what is not proved


class Environment:
    def __init__(self) -> None:
        self.np_random = numpy.random.default_rng(1)
        self.map = [[column % 3 for column in range(64)] for _ in range(64)]

    def step(self, number: int) -> None:
        self.position = (number % 64, int(self.np_random.integers(64)))


# What makes an object (of the package that is named first), and what a step does with it.
OBJECTS = [
    ("argparse.Namespace(**{f'option{n}': [n] for n in range(500)})", "value.option3"),
    ("argparse.ArgumentParser()", "value.parse_args([])"),
    ("logging.Logger('training')", "value.warning('step')"),
    ("concurrent.futures.ThreadPoolExecutor(2)", "value.submit(abs, step).result()"),
    ("sqlite3.connect(':memory:')", "value.execute(f'create table t{step} (x)')"),
    ("sqlalchemy.create_engine('sqlite://')", "value.connect().exec_driver_sql('select 1').all()"),
    ("optuna.create_study(storage='sqlite://')", "value.tell(value.ask(), step)"),
    ("networkx.path_graph(5000)", "value.nodes[step]"),
    (
        "tokenizers.Tokenizer(tokenizers.models.WordLevel({f'w{n}': n for n in range(5000)}, 'w0'))",
        "value.encode('w1')",
    ),
    ("transformers.BertConfig()", "value.to_dict()"),
    ("pandas.DataFrame({'x': range(5000), 'y': [str(n) for n in range(5000)]})", "value.iloc[step]"),
    ("matplotlib.figure.Figure().subplots()", "value.plot([step], [step])"),
    ("tqdm.tqdm(total=100, disable=True)", "value.update()"),
    ("rich.console.Console(quiet=True)", "value.print(step)"),
    ("collections.Counter(f'w{n}' for n in range(4000))", "value['w1']"),
    ("builtins.list({'id': n, 'text': str(n), 'tags': [n]} for n in range(5000))", "value[step]"),
    ("configparser.ConfigParser()", "value.read_dict({'part': {'x': step}})"),
    ("email.message.EmailMessage()", "value.set_content('done' * 500)"),
    ("numpy.random.RandomState(1)", "value.rand()"),
    ("random.Random(1)", "value.random()"),
    ("json.JSONDecoder()", "value.decode('[1]')"),
    ("decimal.Context()", "value.sqrt(step)"),
    ("urllib.request.build_opener()", "value.handlers"),
    (f"{__name__}.Environment()", "value.step(step)"),
]


@pytest.fixture
def count_nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Counted]:
    """Record a scope."""
    made: list[Any] = []
    node = snapshot.Snapshot.node
    monkeypatch.setattr(
        snapshot.Snapshot, "node", lambda self, value, depth: (made.append(value), node(self, value, depth))[1]
    )

    def count(scope: dict[str, Any]) -> Counted:
        made.clear()
        values.begin_boundary()
        walk = snapshot.Snapshot(NOTHING, prices=[])
        values.pack(nodes := walk.variables(scope, "common objects"))
        named = values.names_not_proved(walk, {"": nodes})
        return len(made), walk.prices or [], [*map(str, named)]

    values.forget()
    return count


@pytest.mark.parametrize(("made", "used"), OBJECTS, ids=[made.partition("(")[0] for made, _ in OBJECTS])
def test_an_object_of_a_common_package_is_not_walked_through_at_each_step(
    made: str, used: str, count_nodes: Any
) -> None:
    package = made.partition("(")[0].rpartition(".")[0]
    name = package.partition(".")[0]
    pytest.importorskip(name)
    importlib.import_module(package if ".Figure" not in package else "matplotlib.figure")
    scope = {name: importlib.import_module(name)}
    value = eval(made, scope)

    for step in range(BOUNDARIES):
        eval(used, scope | {"value": value, "step": step})
        count, _, _ = count_nodes({"value": value, "step": step})

    assert count <= MOST_NODES


class Study:
    def ask(self, step: int) -> None:
        self.trials = [SimpleNamespace(step=step, number=number) for number in range(3000)]


def _trainer() -> Any:
    weights = torch.nn.Linear(2, 2)
    return SimpleNamespace(model=weights, study=Study(), state=SimpleNamespace(step=0, best=[1.0]))


@pytest.mark.parametrize(
    ("made", "study_of", "left"),
    [
        (Study, lambda study: study, f"value ({__name__}.Study): about "),
        (_trainer, lambda trainer: trainer.study, f"value.study ({__name__}.Study): about "),
    ],
    ids=["a variable", "an attribute beside what is trained"],
)
def test_what_is_too_dear_is_left_alone_by_name_and_nothing_else(
    made: Callable[[], Any], study_of: Callable[[Any], Study], left: str, count_nodes: Any
) -> None:
    value, losses = made(), [1.0]
    for step in range(4):
        study_of(value).ask(step)
        before, prices, named = count_nodes({"value": value, "losses": losses})
        assert not named

    values.leave_dearest(prices, 1, 1)

    study_of(value).ask(5)
    count, _, named = count_nodes({"value": value, "losses": losses})
    assert before > 3000
    assert count <= MOST_NODES
    assert [name.endswith(" ms a step to record; not recorded") for name in named] == [True]
    assert left in named[0]


def test_what_is_trained_is_recorded_at_any_price(count_nodes: Any) -> None:
    scope = {
        "model": torch.nn.Linear(2, 2),
        "tables": {"weights": torch.ones(2), "trials": [SimpleNamespace(number=1)]},
    }
    values.leave_dearest(count_nodes(scope)[1], 1 << 60, 0)

    assert not count_nodes(scope)[2]
