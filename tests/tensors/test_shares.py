"""The shares of a snapshot or checkpoint: who writes what, and that all of them together are the state."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rank.fakes import RECORD_BYTES
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect import ownership
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.protocol.board import Board, Field
from ttprun.protocol.snapshot_messages import SnapshotTaken
from ttprun.state.files import read_entry
from ttprun.tensors import replicated, shares
from ttprun.tensors.memory import Memory
from ttprun.tensors.open_boundaries import MOST_PUT_OFF
from ttprun.tensors.optimizer_registry import forget, wrap_optimizer_init
from ttprun.tensors.shares import SnapshotPart

SHARES = 3
Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


@pytest.fixture
def trained() -> Iterator[Trained]:
    """A model after one step, known as a script's own is."""
    made = wrap_optimizer_init(torch.optim.Optimizer.__init__)
    original, torch.optim.Optimizer.__init__ = torch.optim.Optimizer.__init__, made  # type: ignore[method-assign]
    forget()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    yield model, optimizer
    torch.optim.Optimizer.__init__ = original  # type: ignore[method-assign]
    forget()


def state() -> dict[str, torch.Tensor]:
    """Copies of all that replicas share."""
    return {part.key: part.tensor.clone() for part in replicated.describe()[1]}


def write_all(folder: Path) -> tuple[list[Any], list[str]]:
    """(header, paths) of a checkpoint's shares."""
    paths = [str(folder / shares.file_of(share)) for share in range(SHARES)]
    written = [shares.write(path, share, SHARES, None) for share, path in enumerate(paths)]
    return written[0].header, paths


def disturb(trained: Trained) -> None:
    """Another state than the one that was written."""
    model, optimizer = trained
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for group in optimizer.state.values():
        group["exp_avg"].mul_(3.0)


def test_shares_are_as_even_as_the_largest_tensor_lets_them_be() -> None:
    chance = random.Random(1)
    for of in (1, 2, 3, 8):
        sizes = [chance.randint(1, 1000) for _ in range(200)]

        owners = shares.divide(sizes, of)

        filled = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == share) for share in range(of)]
        assert max(filled) - min(filled) <= max(sizes)
        assert sum(filled) == sum(sizes)


def test_tensors_of_one_size_are_dealt_out_in_turn_and_all_ranks_deal_alike() -> None:
    assert shares.divide([5, 5, 5, 5, 5], 2) == [0, 1, 0, 1, 0]
    assert shares.divide([1, 9, 1, 1], 2) == [1, 0, 1, 1]
    assert shares.divide([], 2) == []
    assert shares.divide([7], 3) == [0]


def test_what_several_ranks_have_written_together_is_the_state_of_each(tmp_path: Path, trained: Trained) -> None:
    expected = state()
    header, paths = write_all(tmp_path)
    disturb(trained)

    shares.load(header, paths)

    found = state()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_lists_of_tensors_in_an_optimizer_s_state_are_taken_over_with_their_items(
    tmp_path: Path, trained: Trained
) -> None:
    model, optimizer = trained
    held = optimizer.state[next(model.parameters())]
    held["factors"] = [torch.ones(3), [None, torch.full((2,), 2.0)], 0.5, []]
    header, paths = write_all(tmp_path)
    held["factors"] = [torch.zeros(3)]

    shares.load(header, paths)

    first, (nothing, second), third, fourth = optimizer.state[next(model.parameters())]["factors"]
    assert (first.tolist(), nothing, second.tolist(), third, fourth) == ([1.0, 1.0, 1.0], None, [2.0, 2.0], 0.5, [])


def test_every_tensor_is_in_one_share_and_each_file_is_as_it_was_reported(tmp_path: Path, trained: Trained) -> None:
    written = [shares.write(str(tmp_path / str(share)), share, SHARES, None) for share in range(SHARES)]

    held = [key for share in range(SHARES) for key in load_file(tmp_path / str(share))]
    assert sorted(held) == sorted(state())
    for one in written:
        entry = read_entry(tmp_path / str(one.share))
        assert (one.bytes, one.xxh3) == (entry.bytes, entry.xxh3)
    assert len({one.header_xxh3 for one in written}) == 1


def test_a_model_in_the_script_s_variables_is_named_with_its_buffers(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained[0]
    monkeypatch.setattr(shares, "modules_in", lambda frame: iter([("net", model)]))

    written = shares.write(str(tmp_path / "first"), 0, 1, None)

    places = written.model["net"]
    assert places.keys() == model.state_dict().keys()
    assert places["1.running_mean"][1] == "net/1.running_mean"
    assert places["0.weight"][1] in state()
    written = load_file(tmp_path / "first")
    assert all(torch.equal(written[places[name][1]], value) for name, value in model.state_dict().items())


def test_a_tensor_that_is_in_no_file_is_named_and_nothing_is_taken_for_it(tmp_path: Path, trained: Trained) -> None:
    header, paths = write_all(tmp_path)

    with pytest.raises(NotRepairableError, match=r"optimizer\.0/0\.\d/\w+ is in none of the checkpoint's files"):
        shares.load(header, paths[1:])


def test_a_tensor_of_another_shape_in_the_file_is_refused(tmp_path: Path, trained: Trained) -> None:
    header, paths = write_all(tmp_path)
    key = "optimizer.0/0.0/exp_avg"
    (path,) = [path for path in paths if key in load_file(path)]
    save_file(load_file(path) | {key: torch.zeros(3, 3)}, path)

    with pytest.raises(NotRepairableError, match=r"exp_avg is \[3, 3\] of torch.float32 in the checkpoint"):
        shares.load(header, paths)


def test_a_model_of_another_shape_is_refused(tmp_path: Path, trained: Trained) -> None:
    header, paths = write_all(tmp_path)
    header[0][1] = [32, 17]

    with pytest.raises(NotRepairableError, match=r"\[32, 16\] in the script's model, and \[32, 17\] in what was saved"):
        shares.load(header, paths)


def owned(rank: int) -> shares.Differing:
    """Ranks 0 and 1 hold other weights than ranks 2 and 3 of the first layer; the rest is alike."""
    return shares.Differing({"optimizer.0/0.0": (0, 0, 2, 2)}, rank, (0, 1, 2, 3))


def test_of_what_not_all_ranks_hold_alike_the_first_holder_writes_its_own_and_each_rank_loads_its_own(
    tmp_path: Path, trained: Trained
) -> None:
    paths, header, expected = [], [], {}
    for rank in range(4):
        with torch.no_grad():
            next(iter(trained[0].parameters())).fill_(float(rank // 2))
        expected[rank] = state()
        paths.append(str(tmp_path / shares.file_of(rank)))
        header = shares.write(paths[-1], rank, 4, None, owned(rank)).header
    keys = sorted(key for path in paths for key in load_file(path) if "@" in key)

    for rank in (1, 3):
        disturb(trained)
        shares.load(header, paths, owned(rank))
        assert all(torch.equal(expected[rank][key], tensor) for key, tensor in state().items())

    of_first = ("exp_avg", "exp_avg_sq", "step", "weight")
    assert keys == sorted(f"optimizer.0/0.0/{name}@{owner}" for name in of_first for owner in (0, 2))


def test_a_file_of_an_attempt_that_was_given_up_is_not_written_into(tmp_path: Path, trained: Trained) -> None:
    path = tmp_path / "share"
    with open(path, "wb") as earlier:
        earlier.write(b"x" * 10)
        shares.write(str(path), 0, 1, None)
        earlier.write(b"y" * 10)
        earlier.flush()

        assert sorted(load_file(path)) == sorted(state())


# In shared memory.


def memory_file() -> tuple[int, str]:
    """(descriptor, path) as the agent gives them to ranks."""
    fd = os.memfd_create("test")
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def test_a_snapshot_holds_what_a_checkpoint_would_and_can_be_loaded(tmp_path: Path, trained: Trained) -> None:
    expected = state()
    memories = [memory_file() for _ in range(SHARES)]
    written = [shares.copy(Memory(path), share, SHARES, None) for share, (_, path) in enumerate(memories)]
    for share, (fd, path) in enumerate(memories):
        shares.write(str(tmp_path / "disk"), share, SHARES, None)
        assert Path(path).read_bytes() == (tmp_path / "disk").read_bytes()
        assert written[share].bytes == os.fstat(fd).st_size
    disturb(trained)

    shares.load(written[0].header, [path for _, path in memories])

    assert all(torch.equal(tensor, expected[key]) for key, tensor in state().items())


def test_a_second_snapshot_in_the_same_place_is_the_newer_state_whatever_its_size(trained: Trained) -> None:
    _, path = memory_file()
    memory = Memory(path)
    memory.fill(100_000, [memoryview(b"z" * 100_000)])
    for size in (100_000, 50_000, 200_000):
        content = os.urandom(size)

        memory.fill(size, [memoryview(content[:7]), memoryview(b""), memoryview(content[7:])])

        assert Path(path).read_bytes() == content
        assert memory.held_bytes() >= size


def test_more_content_than_was_announced_is_not_written_beyond_the_end() -> None:
    _, path = memory_file()

    with pytest.raises(ValueError, match="more than 10 bytes"):
        Memory(path).fill(10, [memoryview(b"x" * 8), memoryview(b"y" * 8)])

    assert os.stat(path).st_size == 10


# The memory is looked at first.


class FakeLine:
    """Notes what is said to the agent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


def agree(monkeypatch: pytest.MonkeyPatch, free_bytes: int | None, held: int = 0) -> tuple[Board, FakeLine]:
    """The first of two ranks is asked for snapshot 1 at boundary 40, with so much memory free, and so much taken."""
    board, channel = Board.create(2)[1], FakeLine()
    buffers = [[memory_file()[1], memory_file()[1]] for _ in range(2)]
    if held:
        Memory(buffers[1][1]).fill(held, [])
    monkeypatch.setattr(shares, "free_bytes", lambda: free_bytes)
    first = SnapshotPart(board, 0, buffers, every=20, recorder=recorder())
    board.set(0, Field.SNAPSHOT_ASKED, 1)
    for number in (39, 40):
        first.agree(channel, number, is_open=False)  # type: ignore[arg-type]
    return board, channel


def recorder() -> Recorder:
    return Recorder(Recorder.create(RECORD_BYTES), RECORD_BYTES)


def test_a_snapshot_is_taken_where_there_is_memory_for_the_shares_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    size = sum(tensor.nbytes for tensor in state().values())

    for free_bytes, held in ((size, 0), (None, 0), (0, size // 2)):
        board, channel = agree(monkeypatch, free_bytes, held)

        assert (board.get(0, Field.SNAPSHOT_AT), board.get(0, Field.SNAPSHOT_NUMBER)) == (40, 1)
        assert channel.sent == []


def test_a_snapshot_is_put_off_from_an_open_boundary_to_the_next_that_is_not_as_long_as_there_may_be_one(
    monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    monkeypatch.setattr(shares, "free_bytes", lambda: None)
    board = Board.create(2)[1]
    first = SnapshotPart(board, 0, [[memory_file()[1], memory_file()[1]]], every=20, recorder=recorder())
    closed = [(1, 40, True), (1, 41, False), (2, 42, False), (2, 60, False)]
    taken_at = []

    for asked, boundary, is_open in (*closed, *((3, boundary, True) for boundary in range(80, 100))):
        board.set(0, Field.SNAPSHOT_ASKED, asked)
        first.agree(FakeLine(), boundary, is_open)  # type: ignore[arg-type]
        taken_at.append(board.get(0, Field.SNAPSHOT_AT))

    assert taken_at[: len(closed)] == [0, 41, 41, 60]
    assert taken_at[-1] == 80 + MOST_PUT_OFF


def test_a_snapshot_for_which_there_is_no_memory_is_not_taken_by_anybody_and_the_agent_knows(
    monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    size = sum(tensor.nbytes for tensor in state().values())

    board, channel = agree(monkeypatch, size - 1)

    assert board.get(0, Field.SNAPSHOT_AT) == 0
    (report,) = channel.sent
    why_not = "it takes 0 MiB of shared memory, and only 0 MiB more is free (ttprun explain memory-full)"
    assert report == SnapshotTaken(1, 40, why_not)


class Asking(torch.nn.Module):
    """A model that looks, in the middle of its `forward`, at which models there are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        self.found: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            alone = torch.nn.Linear(2, 2)
            x = alone(block(x))
            self.found = [name for name, _ in shares.modules_in(sys._getframe())]
        return x


def test_in_the_middle_of_a_forward_pass_a_model_and_its_parts_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "is_script_code", lambda path: path == __file__)
    model, other = Asking(), torch.nn.Linear(2, 2)

    model(other(torch.ones(2)))

    assert model.found == ["model", "other", "alone"]


def test_records_are_looked_at_whole_while_a_snapshot_of_them_may_be_taken() -> None:
    _, board = Board.create(2)
    part, rare = (SnapshotPart(board, 1, [], every, recorder()) for every in (0, 100))
    asked = []
    for boundary in range(1, 220):
        board.set(0, Field.SNAPSHOT_ASKED, int(boundary >= 50))
        board.set(0, Field.QUIESCE_ASKED, int(boundary == 190))
        asked += [(boundary, part.may_be_due(boundary), rare.may_be_due(boundary))]

    at_once, every_hundred = ([one[0] for one in asked if one[at] and one[0] > MOST_PUT_OFF] for at in (1, 2))
    assert at_once == [*range(50, 51 + MOST_PUT_OFF), 190]
    assert every_hundred == [*range(100, 101 + MOST_PUT_OFF), 190]
