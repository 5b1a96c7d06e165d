"""Tensors that are sharded over the ranks: what each rank writes, and that any number of ranks can read it."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.capture.values.carrying import carry, is_refused, record
from ttprun.capture.records.nodes import WeightNode
from ttprun.capture.values import CannotRestoreError, Restore, UnrecordedTensorError
from ttprun.introspect import model_tensors
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.introspect.tensor_bytes import places
from ttprun.state.chunks import held_of, what_is_missing
from ttprun.state.tensor_file import assemble, pieces_of
from ttprun.tensors import replicated, sharded, shares, state_transfer
from ttprun.tensors.holdings import Holdings
from ttprun.tensors.optimizer_registry import forget, optimizers, stepped, stepped_tensors, wrap_optimizer_init
from ttprun.tensors.state_transfer import InDirectory

STEPS = 3
LIMIT_S = 60.0
_worlds = count()
ROWS = [("even", (12, 5), 0), ("uneven", (7, 3), 0), ("columns", (4, 12), 1), ("bias", (2,), 0)]


@contextmanager
def world(rank: int, size: int) -> Iterator[DeviceMesh]:
    """This process as one rank of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    forget()
    # DTensor keeps what it has found out by equal meshes, and with it another rank's mesh, unless they have other names.
    try:
        yield DeviceMesh("cpu", list(range(size)), mesh_dim_names=(f"of world {next(_worlds)}",))
    finally:
        forget()
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _known_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers are known as a script's own are."""
    made = wrap_optimizer_init(torch.optim.Optimizer.__init__)
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", made)


def shard(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a tensor."""
    empty = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    spec = sharded.chunk_of(_like(empty, mesh, placements))
    local = whole
    if spec is not None:
        ranges = zip(spec.offsets, spec.sizes, strict=True)
        local = whole[tuple(slice(begin, begin + length) for begin, length in ranges)].clone()
    return _from_local(local, whole, mesh, placements)


def _like(whole: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return _from_local(whole.to_local(), whole, mesh, placements)


def _from_local(local: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def whole_tensors(seed: int) -> list[torch.Tensor]:
    """Of the parameters of ROWS, and one that no rank shards."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=made) for shape in (*(shape for _, shape, _ in ROWS), (3, 3))]


def train(mesh: DeviceMesh, steps: int) -> list[torch.Tensor]:
    """Parameters behind some steps of AdamW, with gradients that are the same parts of the same whole ones."""
    placed = [[Shard(dim)] for _, _, dim in ROWS]
    *cut, alike = whole_tensors(0)
    parameters = [torch.nn.Parameter(shard(one, mesh, at)) for one, at in zip(cut, placed, strict=True)]
    parameters.append(torch.nn.Parameter(alike.clone()))
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    train.optimizer = optimizer  # type: ignore[attr-defined]  # it lives as long as its parameters are used
    for step in range(steps):
        *cut, alike = whole_tensors(1 + step)
        for parameter, gradient, at in zip(parameters, cut, placed, strict=False):
            parameter.grad = shard(gradient, mesh, at)
        parameters[-1].grad = alike
        optimizer.step()
    return parameters


def written_by(size: int, folder: Path, ranks: Sequence[int] | None = None) -> list[Any]:
    """What the ranks report of the shares that they have written, all of them or some."""
    folder.mkdir()
    written = []
    ranks = range(size) if ranks is None else ranks
    for share, rank in enumerate(ranks):
        with world(rank, size) as mesh:
            train(mesh, STEPS)
            written.append(shares.write(str(folder / shares.file_of(share)), share, len(ranks), None))
    return written


def held(parts: list[replicated.Part]) -> dict[str, torch.Tensor]:
    return {part.key: part.tensor.clone() for part in parts}


@pytest.mark.parametrize(("old", "new"), [(2, 2), (2, 3), (4, 2), (3, 1), (1, 4)])
def test_what_some_ranks_have_written_any_other_number_of_ranks_reads_exactly(
    tmp_path: Path, old: int, new: int
) -> None:
    written = written_by(old, tmp_path / "saved")
    files = sorted(str(path) for path in (tmp_path / "saved").iterdir())

    for rank in range(new):
        with world(rank, new) as mesh:
            train(mesh, STEPS)
            expected = held(replicated.describe()[1])
        with world(rank, new) as mesh:
            train(mesh, 1)
            before = held(replicated.describe()[1])
            shares.load(written[0].header, files)
            got = held(replicated.describe()[1])
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in got), rank
        assert not all(torch.equal(before[key], expected[key]) for key in got)
    assert len({one.header_xxh3 for one in written}) == 1


def test_a_share_that_is_not_there_is_noticed_before_anything_goes_on(tmp_path: Path) -> None:
    written = written_by(3, tmp_path / "saved")
    files = sorted(str(path) for path in (tmp_path / "saved").iterdir())

    with world(0, 2) as mesh:
        train(mesh, 1)
        with pytest.raises(NotRepairableError, match=r"is not whole in the checkpoint|is in none of"):
            shares.load(written[0].header, files[:1])


def test_what_a_lost_rank_held_is_named_by_those_that_are_left(tmp_path: Path) -> None:
    written = written_by(4, tmp_path / "saved", ranks=[0, 2])

    missing = what_is_missing(held_of(written[0].held), [0, 2])

    assert missing == [
        "optimizer.0/0.0/weight rows 3:6 (rank 1)",
        "optimizer.0/0.0/weight rows 9:12 (rank 3)",
        "optimizer.0/0.1/weight rows 2:4 (rank 1)",
        "optimizer.0/0.1/weight rows 6:7 (rank 3)",
        "optimizer.0/0.2/weight [0:4, 3:6] (rank 1)",
        "optimizer.0/0.2/weight [0:4, 9:12] (rank 3)",
        "optimizer.0/0.3/weight rows 1:2 (rank 1)",
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_whole_tensors_can_be_put_together_and_torchs_own_reader_reads_them_too(tmp_path: Path) -> None:
    written_by(3, tmp_path / "saved")
    with world(0, 1) as mesh:
        expected = [model_tensors.local_of(parameter).detach() for parameter in train(mesh, STEPS)]

    pieces = pieces_of(sorted(str(path) for path in (tmp_path / "saved").iterdir()))
    keys = [f"optimizer.0/0.{number}/weight" for number in range(len(expected))]
    read = {key: torch.zeros_like(one) for key, one in zip(keys, expected, strict=True)}
    load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path / "saved")), no_dist=True)

    for key, one in zip(keys, expected, strict=True):
        assert torch.equal(assemble(key, pieces[key]), one)
        assert torch.equal(read[key], one)


def test_ranks_that_hold_other_parts_have_one_digest_and_ranks_that_differ_in_what_is_alike_have_not() -> None:
    digests = []
    for rank in range(2):
        with world(rank, 2) as mesh:
            *_, alike = train(mesh, STEPS)
            digests.append(replicated.digest())
            with torch.no_grad():
                alike.add_(rank)
            digests.append(replicated.digest())

    assert digests[0] == digests[1] == digests[2] != digests[3]


@contextmanager
def a_survivor(directory: Path) -> Iterator[None]:
    """Another process holds what this one holds now, and sends it to who asks."""
    process = multiprocessing.get_context("fork").Process(
        target=state_transfer.serve, args=(InDirectory(str(directory), "state"), 1, LIMIT_S, lambda: None)
    )
    process.start()
    yield
    process.join(LIMIT_S)


def test_a_replacement_takes_over_the_part_of_a_survivor_that_holds_the_same(tmp_path: Path) -> None:
    with world(0, 2) as mesh:
        parts = [model_tensors.local_of(parameter) for parameter in train(mesh, STEPS)]
        expected = [part.detach().clone() for part in parts]
        with a_survivor(tmp_path):
            with torch.no_grad():
                for part in parts:
                    part.zero_()
            state_transfer.fetch(InDirectory(str(tmp_path), "state"), LIMIT_S, lambda: None)

        assert all(torch.equal(part, before) for part, before in zip(parts, expected, strict=True))


def test_a_replacement_refuses_the_part_of_a_survivor_that_holds_another(tmp_path: Path) -> None:
    with world(0, 2) as mesh:
        train(mesh, STEPS)
        survivor = a_survivor(tmp_path)
        survivor.__enter__()
    with world(1, 2) as mesh:
        train(mesh, STEPS)
        with pytest.raises(NotRepairableError, match=r"this rank's part is .*1 of 2 by .*, and the source's .*0 of 2"):
            state_transfer.fetch(InDirectory(str(tmp_path), "state"), LIMIT_S, lambda: None)
    survivor.__exit__(None, None, None)


def test_ways_of_sharding_that_are_not_stored_are_refused_with_the_reason() -> None:
    with world(1, 4) as mesh:
        square = DeviceMesh("cpu", [[0, 1], [2, 3]])
        part = DeviceMesh("cpu", [0, 1])
        whole = torch.randn(8, 8)
        good = [shard(whole, mesh, [Shard(0)]), shard(whole, square, [Replicate(), Shard(1)]), whole]
        good += [
            shard(whole, part, [Shard(0)]),
            strided(whole[:2], square, [_StridedShard(0, split_factor=2), Shard(0)]),
        ]
        pieces = strided(whole[::2], square, [_StridedShard(0, split_factor=4), Replicate()])

        assert not sharded.why_not_stored(good)
        assert "not one box each" in sharded.why_not_stored([*good, pieces]).text
        assert (
            "do not match their mesh"
            in sharded.why_not_stored(
                [DTensor.from_local(whole[:3], mesh, [Shard(0)], run_check=False, shape=(8, 8), stride=(8, 1))]
            ).text
        )


def strided(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A part of a tensor of 8 x 8."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=(8, 8), stride=(8, 1))


@pytest.mark.parametrize("rows", [8, 7, 5, 2])
@pytest.mark.parametrize("placements", [(_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(0))], ids=str)
def test_the_parts_of_what_is_sharded_twice_along_one_dimension_make_the_whole(
    rows: int, placements: tuple[Placement, ...]
) -> None:
    with world(0, 4):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        whole = DTensor.from_local(torch.empty(0, 3), mesh, placements, run_check=False, shape=(rows, 3), stride=(3, 1))

        boxes = [(offsets[0], sizes[0]) for _, _, offsets, sizes in sharded.held_by_all(whole)]

        assert sorted(row for begin, size in boxes for row in range(begin, begin + size)) == list(range(rows))


def test_what_a_rank_holds_of_a_sharded_variable_comes_back_and_another_way_of_sharding_is_refused() -> None:
    with world(1, 2) as mesh:
        lost, here = shard(torch.randn(6, 4), mesh, [Shard(0)]), shard(torch.randn(6, 4), mesh, [Shard(0)])
        scope = {"norm": here}

        mismatches = carry({"norm": lost}, scope)

        assert mismatches == []
        assert scope["norm"] is here
        assert torch.equal(model_tensors.local_of(here), model_tensors.local_of(lost))
        assert is_refused({"norm": lost}, {"norm": shard(torch.randn(6, 4), mesh, [Shard(1)])})
        assert is_refused({"norm": lost}, {"norm": torch.randn(6, 4)})


def test_a_sharded_weight_in_a_variable_is_the_replacements_own_weight_there() -> None:
    with world(0, 2) as mesh:
        lost, own, other = (torch.nn.Parameter(shard(torch.randn(6, 4), mesh, [Shard(0)])) for _ in range(3))
        recorded, blobs = record({"same": lost, "new": lost}, {model_tensors.local_of(lost).data_ptr()})
        here = {"same": own, "new": other}

        Restore(blobs, is_comparing=True, stepped=[own]).module(here, recorded, "")

        assert isinstance(recorded["same"], WeightNode)
        assert recorded["same"].shape == [6, 4]
        assert blobs == []
        assert here["same"] is own
        assert here["new"] is own


@pytest.mark.parametrize("moved", [[Shard(1)], [Replicate()], None], ids=["shard", "replicate", "plain"])
def test_a_parameter_that_is_redistributed_during_the_training_is_named_at_that_step(
    moved: list[Placement] | None,
) -> None:
    with world(0, 2) as mesh:
        weights = [torch.nn.Parameter(shard(torch.randn(6, 4), mesh, [Shard(0)])) for _ in range(3)]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        holdings = Holdings()
        before = [str(holdings.why_moved(stepped([optimizer]))) for _ in range(2)]
        whole = torch.randn(6, 4)

        optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(shard(whole, mesh, moved) if moved else whole)

        assert before == ["", ""]
        for _ in range(2):
            why_moved = str(holdings.why_moved(stepped([optimizer])))
            assert "a parameter (number 2 of the optimizers) was redistributed" in why_moved


def test_an_equal_layout_is_no_move() -> None:
    with world(0, 2) as mesh:
        optimizer = torch.optim.SGD([torch.nn.Parameter(shard(torch.randn(6, 4), mesh, [Shard(0)]))], lr=0.1)
        holdings = Holdings()
        holdings.why_moved(stepped([optimizer]))

        optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(shard(torch.randn(6, 4), mesh, [Shard(0)]))

        assert not holdings.why_moved(stepped([optimizer]))


def test_a_sharded_weight_in_a_state_dict_that_the_replay_has_not_made_is_made_of_the_replacements_own() -> None:
    with world(0, 2) as mesh:
        lost, own = (torch.nn.Parameter(shard(torch.randn(6, 4), mesh, [Shard(0)])) for _ in range(2))
        recorded, blobs = record({"saved": lost.detach()}, {model_tensors.local_of(lost).data_ptr()})
        here: dict[str, Any] = {"saved": None}

        Restore(blobs, is_comparing=True, stepped=[own]).module(here, recorded, "")

        assert model_tensors.local_of(here["saved"]).data_ptr() == model_tensors.local_of(own).data_ptr()
        assert (here["saved"].placements, here["saved"].requires_grad) == (own.placements, False)


def test_a_view_of_a_sharded_weight_that_the_replay_has_not_made_is_refused() -> None:
    with world(0, 2) as mesh:
        lost, own = (torch.nn.Parameter(shard(torch.randn(6, 4), mesh, [Shard(0)])) for _ in range(2))
        recorded, blobs = record({"view": lost.detach().t()}, {model_tensors.local_of(lost).data_ptr()})

        with pytest.raises(CannotRestoreError, match="view is made of a sharded weight"):
            Restore(blobs, is_comparing=True, stepped=[own]).module({"view": None}, recorded, "")


def test_who_goes_backward_through_a_sharded_activation_of_the_step_before_is_warned() -> None:
    with world(0, 2) as mesh:
        lost, here = (shard(torch.randn(6, 4), mesh, [Shard(0)]).requires_grad_() * 2 for _ in range(2))
        scope = {"fake": here}

        carry({"fake": lost}, scope)

        assert torch.equal(model_tensors.local_of(scope["fake"]), model_tensors.local_of(lost))
        with pytest.raises(UnrecordedTensorError, match="fake was computed before an optimizer step"):
            scope["fake"].to_local().sum().backward()


def test_on_the_way_to_the_boundary_the_replay_goes_backward_through_its_own_sharded_activation() -> None:
    with world(0, 2) as mesh:
        lost, weight = (shard(torch.randn(6, 4), mesh, [Shard(0)]).requires_grad_() for _ in range(2))
        recorded, blobs = record({"fake": lost * 2})
        scope = {"fake": weight * 2}

        Restore(blobs, is_comparing=False).module(scope, recorded, "")
        scope["fake"].to_local().sum().backward()

        assert torch.equal(model_tensors.local_of(scope["fake"]), model_tensors.local_of(lost * 2))
        assert weight.grad is not None


class Outer(torch.nn.Module):
    """A module of the user's with one other in it, as DistributedDataParallel has one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.seen: list[int] = []


def test_what_a_module_of_the_user_s_keeps_is_recorded_though_fsdp_has_given_it_a_class_of_its_own() -> None:
    with world(0, 2) as mesh:
        lost, here = (fully_shard(Outer(), mesh=mesh) for _ in range(2))
        lost.seen += [3, 5]

        mismatches = carry({"model": lost}, {"model": here})

        assert mismatches == []
        assert here.seen == [3, 5]
        weights = zip(here.parameters(), lost.parameters(), strict=True)
        assert all(torch.equal(model_tensors.local_of(one), model_tensors.local_of(other)) for one, other in weights)


def test_a_sharded_parameter_that_has_other_memory_is_seen_at_the_next_boundary() -> None:
    with world(0, 2) as mesh:
        parameters = train(mesh, 1)
        for _ in range(2):  # the second one knows that they are sharded
            before = stepped(optimizers())
        samples = list(map(before.sample, range(len(parameters))))
        first: Any = parameters[0]

        first._local_tensor = first._local_tensor + 1.0

        after = stepped(optimizers())
        assert before.is_sharded
        assert after is not before
        assert after.storages == places(stepped_tensors())
        found = list(map(after.sample, range(len(parameters))))
        assert [new == old for new, old in zip(found, samples, strict=True)] == [False, True, True, True, True]
        assert stepped(optimizers()) is after


def test_a_gradient_is_cut_like_its_parameter_only_if_each_rank_holds_the_same_part_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with world(0, 2) as mesh:
        whole = torch.arange(24.0).view(6, 4)
        parameter = shard(whole, mesh, [Shard(0)])
        of_fsdp2 = parameter.detach()  # it has its parameter's own description
        alike, other = shard(whole, mesh, [Shard(0)]), shard(whole, mesh, [Shard(1)])

        found = [sharded.are_cut_alike(one, parameter) for one in (of_fsdp2, alike, other, whole)]

        monkeypatch.setattr(sharded, "place_of", lambda tensor: 1 / 0)
        parameter_again = DTensor(parameter._local_tensor, parameter._spec, requires_grad=False)
        assert sharded.are_cut_alike(parameter_again, parameter)
    assert found == [True, True, False, False]


class Announced(dict[str, bytes]):
    """What ranks tell each other by way of their agents."""

    address = "127.0.0.1"

    def put(self, generation: int, key: str, value: bytes) -> None:
        self[key] = value

    def get(self, generation: int, key: str, limit_s: float) -> bytes:
        return self[key]


def test_over_nodes_only_who_sends_the_token_gets_the_state() -> None:
    values = Announced()
    place = state_transfer.OverNodes(values, 1, "repair", limit_s=5.0)
    with place.listen(1):
        token = values["repair"].split()[2]
        for sent, is_admitted in ((token, True), (b"0" * len(token), False)):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.sendall(sent)
                assert place.admits(ours) is is_admitted
