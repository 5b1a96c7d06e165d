"""What a rank keeps of its state in shared memory, and that a replacement gets from it the very state that it had."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.rank.fakes import FakeChannel, make_session
from ttprun.introspect.current_rank import Rank as Session
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.board import SLOTS, Board, Field, SlotContent, slot_of, unpack_slot
from ttprun.tensors import mirror, optimizer_registry, own_state, shares
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.mirror_slots import Stored
from ttprun.tensors.own_state import OwnState
from ttprun.tensors.replicated import PostStepWeights


class ListedMomentum(torch.optim.Optimizer):
    """Keeps its state in a list, as LBFGS does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for weight in (weight for weight in self.param_groups[0]["params"] if weight.grad is not None):
                newest = self.state[weight].setdefault("newest", [])
                newest[:] = [*newest[-1:], weight.grad.clone()]
                weight -= 0.1 * sum(newest)


Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adam": lambda weights: torch.optim.AdamW(weights, lr=0.01),
    "counts in plain numbers": lambda weights: torch.optim.ASGD(weights, lr=0.1, foreach=False),
    "no state": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "lists": lambda weights: ListedMomentum(weights, {}),
}
_channels: list[FakeChannel] = []
CELLS = (Field.MIRROR_0, Field.MIRROR_1)


def order(paths: list[str], limit_bytes: int, limit_share: float = 0.0) -> to_rank.KeepMirror:
    return to_rank.KeepMirror(0, 1.0, paths=tuple(paths), limit_bytes=limit_bytes, limit_share=limit_share)


class Rank:
    """A process's weights and optimizer, with the hooks' calls around each step."""

    def __init__(self, make: Make, seed: int, paths: list[str], page: Board | None = None, alone: bool = False) -> None:
        optimizer_registry.forget()
        generator = torch.Generator().manual_seed(seed)
        self.weights = [torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), ())]
        for weight in self.weights:
            weight.requires_grad_()
        self.optimizer = make(self.weights)
        self.board = page or Board.create(2)[1]
        self.channel = FakeChannel()
        _channels.append(self.channel)
        self.session: Session = make_session(channel=self.channel, board=self.board, mirror=Mirror(self.board, 0, []))
        if paths and not alone:
            self.session[Mirror].want(order(paths, 1 << 20))
        recorder = SimpleNamespace(export=lambda boundary: {})
        self.session.parts[OwnState] = OwnState(self.board, 0, paths if alone else [], recorder)
        self.boundary, self.paths = 0, paths
        self.states: dict[int, list[torch.Tensor]] = {}

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(100 + self.boundary)
        for number, weight in enumerate(self.weights):
            weight.grad = None if (number + self.boundary) % 3 == 2 else torch.randn(weight.shape, generator=generator)

    def record(self) -> None:
        """As the hook before a step does it."""
        stepped = optimizer_registry.stepped(optimizer_registry.optimizers())
        self.session[PostStepWeights].compare(stepped, stepped.sample(self.boundary + 1))
        self.session[Mirror].complete(self.session, self.boundary + 1, self.optimizer)

    def take(self) -> None:
        """As the hook after a step does it."""
        self.optimizer.step()
        self.boundary += 1
        self.states[self.boundary] = self.state
        self.session[PostStepWeights].note(self.boundary)
        self.session[OwnState].keep(self.session, self.boundary)
        self.session[Mirror].begin(self.session, self.boundary)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.backward()
            self.record()
            self.take()

    @property
    def state(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in optimizer_registry.stepped_tensors()]

    def way_to(self, boundary: int) -> tuple[str, str]:
        """In what way the state of a boundary comes from the mirror, and from which slot."""
        self.session[Mirror].end()
        return given_by(self.board, self.paths, CELLS).get(boundary, ("", ""))


@pytest.fixture
def paths() -> Iterator[list[str]]:
    fds = [os.memfd_create("mirror") for _ in range(2 * SLOTS)]
    yield [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds]
    for fd in fds:
        os.close(fd)


@pytest.fixture(autouse=True)
def _known_optimizers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = optimizer_registry.wrap_optimizer_init(torch.optim.Optimizer.__init__)
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", made)
    yield
    optimizer_registry.forget()
    while _channels:
        _channels.pop().close()


def replacement_from(
    way: str, path: str, make: Make, page: Board | None = None, paths: Sequence[str] = (), alone: bool = False
) -> Rank:
    """A new process that has loaded what there is, in this way."""
    replacement = Rank(make, 2, [*paths], page, alone)
    if alone:
        shares.load(Stored(path).described, [path])
    elif way == "state":
        mirror.load(path)
    else:
        mirror.load_step(path, replacement.optimizer)
        replacement.optimizer.step()
    return replacement


class KilledError(BaseException):
    """The process is killed here."""


def given_by(board: Board, paths: list[str], cells: tuple[int, int]) -> dict[int, tuple[str, str]]:
    """By boundary whose state a process has left: in what way it comes from there, and from which slot."""
    slots = [(unpack_slot(board.get(0, cell)), path) for cell, path in zip(cells, paths, strict=False)]
    ways = [(slot.boundary + at, slot.gives(slot.boundary + at), path) for slot, path in slots for at in (0, 1)]
    return {boundary: (way, path) for boundary, way, path in ways if way}


@pytest.mark.parametrize("alone", [False, True], ids=["mirror", "own state"])
@pytest.mark.parametrize("seed", range(15))
def test_whenever_a_rank_is_killed_all_that_is_left_is_whole_and_its_newest_step_is_there(
    alone: bool, seed: int, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, chance, page, room = [*OPTIMIZERS.values()][seed % 5], random.Random(seed), Board.create(2)[1], [0]

    def live() -> None:
        room[0] -= 1
        if room[0] < 0:
            raise KilledError

    def copy_until_killed(targets: list[torch.Tensor], sources: list[torch.Tensor], **_: bool) -> None:
        for target, source in zip(targets, sources, strict=True):
            live()
            target.copy_(source)

    def train(rank: Rank) -> None:
        while True:
            for act in (live, rank.backward, live, rank.record, live, rank.take):
                act()

    monkeypatch.setattr(torch, "_foreach_copy_", copy_until_killed)
    monkeypatch.setattr(own_state, "CHEAP_S", 60.0)  # it is kept after each step
    rank = Rank(make, 1, paths, page, alone)
    for _ in range(6):
        room[0] = chance.randrange(150)
        with pytest.raises(KilledError):
            train(rank)
        room[0] = 1 << 30
        rank.session[Mirror].end()
        given, states = given_by(page, paths, own_state.CELLS if alone else CELLS), rank.states
        newest = max(given, default=0)
        assert newest >= rank.boundary - alone or rank.boundary < 2
        if newest > rank.boundary:
            rank.optimizer.step()
            states[newest] = rank.state
        for boundary, how in sorted(given.items()):
            rank = replacement_from(*how, make, page, paths, alone)
            assert all(map(torch.equal, rank.state, states[boundary])), (boundary, how)
        rank.boundary, rank.states = newest, states
        rank.session[PostStepWeights].note(newest)
        rank.session[Mirror].begin(rank.session, newest)
        if not given or chance.random() < 0.3:  # all begin anew
            rank.session[Mirror].end()
            for cell in (*CELLS, *own_state.CELLS):
                page.set(0, cell, 0)
            rank = Rank(make, 1, paths, page, alone)
    rank.session[Mirror].end()


def test_one_slow_copy_and_the_export_of_records_do_not_make_own_state_too_dear_to_keep_after_each_step(
    monkeypatch: pytest.MonkeyPatch, paths: list[str]
) -> None:
    cpu_s = iter([0.0, 0.0, 0.0, 0.0008, *(0.0,) * 200])  # two copies are not measured; the next begins, and has ended
    now_s = itertools.count(1.0, 0.001)  # a step takes next to no time
    clock = SimpleNamespace(thread_time=lambda: next(cpu_s), monotonic=lambda: next(now_s))
    monkeypatch.setattr(own_state, "time", clock)
    rank = Rank(OPTIMIZERS["no state"], 1, paths, alone=True)

    rank.step(8)

    assert max(unpack_slot(rank.board.get(0, cell)).boundary for cell in own_state.CELLS) == 8


def test_weights_that_the_script_changes_between_its_steps_are_those_that_the_step_begins_with(
    paths: list[str],
) -> None:
    lost = Rank(OPTIMIZERS["momentum"], 1, paths)
    lost.optimizer.state[lost.weights[0]]["wide"] = torch.ones(2, dtype=torch.complex128)
    for _ in range(5):
        lost.step()
        with torch.no_grad():
            lost.weights[0].clamp_(-0.1, 0.1)
    lost.backward()
    lost.record()
    way = lost.way_to(6)
    lost.optimizer.step()
    expected = lost.state

    assert way[0] == "step"
    assert all(map(torch.equal, replacement_from(*way, OPTIMIZERS["momentum"]).state, expected))


def test_a_state_that_changes_while_it_is_copied_is_not_used(paths: list[str]) -> None:
    lost = Rank(OPTIMIZERS["momentum"], 1, paths)
    lost.step(3)
    lost.session[Mirror].end()
    lost.session[PostStepWeights].note(3)
    with torch.no_grad():
        lost.weights[1].mul_(2)

    lost.session[Mirror].begin(lost.session, 3)

    assert lost.way_to(3)[0] == "step"


def test_a_step_that_depends_on_more_is_not_taken_again_and_the_copy_after_it_is_waited_for(paths: list[str]) -> None:
    lost = Rank(lambda weights: torch.optim.AdamW(weights, lr=0.01, fused=True), 1, paths)
    lost.optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]  # as a GradScaler does it
    lost.optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    for _ in range(3):
        lost.step()

    found = unpack_slot(lost.board.get(0, CELLS[3 % SLOTS]))  # the copy was waited for
    lost.backward()
    lost.record()

    assert found.gives(3) == "state"
    assert lost.way_to(4)[0] == ""


def test_what_cannot_be_mirrored_is_reported_once_and_training_continues(paths: list[str]) -> None:
    rank = Rank(OPTIMIZERS["momentum"], 1, paths)
    rank.optimizer.state[rank.weights[0]]["newest"] = {}

    rank.step(3)

    (report,) = rank.channel.sent
    assert isinstance(report, from_rank.StateMirrored)
    assert "state 'newest' of type dict" in report.why_not
    assert rank.way_to(1)[0] == ""


def test_an_optimizer_that_is_shown_its_parameters_during_its_step_only_is_mirrored(paths: list[str]) -> None:
    rank = Rank(OPTIMIZERS["momentum"], 1, paths)
    rank.step(3)
    rank.optimizer.param_groups[0]["params"] = []

    rank.session[Mirror].begin(rank.session, 4)
    rank.session[Mirror].complete(rank.session, 5, rank.optimizer)

    assert rank.session[Mirror].why_off == ""
    assert rank.session[Mirror].held(4) == SlotContent(4, has_state=True, has_step=True)
    stored = Stored(paths[slot_of(4)])
    assert stored.keys == [f"optimizer.0/0.{at}/{kind}" for at in range(3) for kind in ("weight", "momentum_buffer")]
    rank.session[Mirror].end()


def test_a_mirror_that_takes_more_than_it_may_is_reported_once_and_gives_its_memory_back(paths: list[str]) -> None:
    rank = Rank(OPTIMIZERS["momentum"], 1, paths)
    rank.step(3)
    before = [os.stat(path).st_size for path in paths[:SLOTS]]

    rank.session[Mirror].want(order(paths, 1000))
    rank.weights.append(torch.zeros(9, requires_grad=True))
    rank.optimizer.add_param_group({"params": rank.weights[-1:]})
    rank.step(3)

    *_, report = rank.channel.sent
    assert isinstance(report, from_rank.StateMirrored)
    assert (report.why_not, report.bytes > 1000) == ("too little memory", True)
    assert all(before)
    assert [os.stat(path).st_size for path in paths[:SLOTS]] == [0, 0]
    assert rank.way_to(6)[0] == rank.way_to(5)[0] == ""


def test_a_rank_that_is_to_keep_no_mirror_has_no_thread_for_it(paths: list[str]) -> None:
    rank = Rank(OPTIMIZERS["momentum"], 1, [])

    rank.step(3)

    assert not any(thread.name.startswith("ttprun-mirror") for thread in threading.enumerate())
    assert rank.channel.sent == []


@pytest.mark.parametrize(("limit", "cheap_s", "is_off"), [(1e-9, 0.0, True), (0.0, 0.0, False), (1e-9, 0.005, False)])
def test_a_mirror_whose_copies_are_not_cheap_but_take_much_of_each_step_is_off_unless_it_was_asked_for(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, limit: float, cheap_s: float, is_off: bool
) -> None:
    monkeypatch.setattr(mirror, "_CHEAP_S", cheap_s)
    rank = Rank(OPTIMIZERS["momentum"], 1, paths)
    rank.session[Mirror].want(order(paths, 1 << 20, limit))

    rank.step(12)

    whys = [message.why_not for message in rank.channel.sent if isinstance(message, from_rank.StateMirrored)]
    assert len(whys) == 1 + is_off
    assert (whys[-1][:12] == "a copy takes") == is_off
    assert (rank.way_to(12)[0] == "") == is_off
