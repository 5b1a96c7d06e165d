"""Whether a script reads gradients between a step and the next backward, as its code shows it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ttprun.capture.position import liveness
from ttprun.capture.position.liveness import are_read_after

SCRIPT = """
def norm_of(model):
    return sum(one.grad for one in model)


def learn(model):
    loss.backward()
    clip(one.grad for one in model)
    optimizer.step()


class Trainer:
    def log(self):
        print(norm_of(model))

    def look(self):
        print([one.grad for one in model])

    def train(self):
        for epoch in range(2):
            loss.backward()
            optimizer.step()
            BEHIND


for epoch in range(2):
    BEGINNING
    loss.backward()
    [one.grad for one in model]
    optimizer.step()
    BEHIND
AFTER
"""


class Stands:
    """A loss, and an optimizer whose step asks."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def step(self) -> None:
        self.found.append(are_read_after(sys._getframe(1)))

    def backward(self) -> None: ...
    def zero_grad(self) -> None: ...


def found_in(monkeypatch: pytest.MonkeyPatch, beginning: str, behind: str, after: str) -> bool:
    monkeypatch.setattr(liveness, "is_script_code", lambda filename: filename == "train.py")
    monkeypatch.setattr("ttprun.introspect.ownership.is_script_code", lambda filename: filename == "train.py")
    text = SCRIPT.replace("BEGINNING", beginning).replace("    BEHIND\nAFTER", f"    {behind}\n{after}")
    stands = Stands()
    scope: dict[str, Any] = {"loss": stands, "optimizer": stands, "model": [], "clip": list}
    exec(compile(text.replace("BEHIND", "self.look()"), "train.py", "exec"), scope)
    return stands.found[0]


@pytest.mark.parametrize(
    ("beginning", "behind", "after", "are_read"),
    [
        ("pass", "pass", "", False),
        ("optimizer.zero_grad()", "print(epoch)", "", False),
        ("pass", "print([one.grad for one in model])", "", True),
        ("pass", "print(norm_of(model))", "", True),
        ("pass", "if epoch == 7: print(norm_of(model))", "", True),
        ("print(norm_of(model))", "pass", "", True),
        ("optimizer.zero_grad(); print(norm_of(model))", "pass", "", False),
        ("pass", "optimizer.zero_grad(); print(norm_of(model))", "", False),
        ("pass", "pass", "print(norm_of(model))", True),
        ("Trainer().train()", "pass", "", True),
        ("learn(model)", "pass", "", False),
        ("pass", "pass", "learn(model)", False),
    ],
)
def test_gradients_are_read_if_no_backward_comes_before(
    monkeypatch: pytest.MonkeyPatch, beginning: str, behind: str, after: str, are_read: bool
) -> None:
    assert found_in(monkeypatch, beginning, behind, after) is are_read
