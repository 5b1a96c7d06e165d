"""Tensors in safetensors files come back bit for bit, through the library and through torch's own reader."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from ttprun.state.files import write_file
from ttprun.state.tensor_file import CODES, tensor_chunks


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def odd_tensors() -> dict[str, Tensor]:
    """Every type, and the shapes that are easily got wrong."""
    base = torch.arange(12.0)
    return {
        **{f"types/{dtype}": (torch.arange(6).reshape(2, 3) % 2).to(dtype) for dtype in CODES},
        "optimizer.0/12/step": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "transposed": base.reshape(3, 4).t(),
        "view": base[3:7],
        "the same memory again": base[2:9],
        "conjugated": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
        "nan and -0": torch.tensor([float("nan"), -0.0, float("inf")]),
    }


def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = odd_tensors()
    write_file(tmp_path / "t.safetensors", tensor_chunks(tensors, {"format": "pt"}))

    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        read = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)
        metadata = file.metadata()

    assert metadata == {"format": "pt"}
    assert {key: (one.dtype, one.shape) for key, one in read.items()} == {
        key: (one.dtype, one.shape) for key, one in tensors.items()
    }
    assert {key: bits(one) for key, one in read.items()} == {
        key: bits(one.resolve_conj()) for key, one in tensors.items()
    }


def test_every_tensor_lies_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    write_file(tmp_path / "t.safetensors", tensor_chunks(odd_tensors()))

    content = (tmp_path / "t.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    sizes = {code: dtype.itemsize for dtype, code in CODES.items()}
    assert start % 8 == 0
    assert [one for one in header.values() if one["data_offsets"][0] % sizes[one["dtype"]]] == []


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()],
    ids=["complex128", "sparse"],
)
def test_what_the_format_cannot_hold_is_refused_by_name_before_anything_is_written(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match=r"'odd' is .*, which safetensors cannot hold"):
        tensor_chunks({"odd": tensor})


def test_torchs_own_reader_loads_a_checkpoint_directory(tmp_path: Path) -> None:
    tensors = odd_tensors()
    write_file(tmp_path / "tensors-00000.safetensors", tensor_chunks(tensors))
    write_file(tmp_path / "tensors-00001.safetensors", tensor_chunks({"of rank 1": torch.ones(3)}))
    (tmp_path / "ttprun.json").write_text("{}")
    wanted = {key: torch.empty_like(one) for key, one in tensors.items()} | {"of rank 1": torch.empty(3)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)

    expected = tensors | {"of rank 1": torch.ones(3)}
    assert {key: bits(one.resolve_conj()) for key, one in wanted.items()} == {
        key: bits(one.resolve_conj()) for key, one in expected.items()
    }


def test_torchs_own_reader_puts_shards_together_if_the_header_says_where_they_belong(tmp_path: Path) -> None:
    for number, rows in enumerate((range(2), range(2, 5))):
        shard = torch.tensor([[10.0 * row, 10.0 * row + 1] for row in rows])
        where = {"DCP_SHARDING_INFO": json.dumps({"weight": {"saved_offsets": [rows.start, 0]}})}
        write_file(tmp_path / f"tensors-{number:05d}.safetensors", tensor_chunks({"weight": shard}, where))
    wanted = {"weight": torch.empty(5, 2)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)

    assert wanted["weight"].tolist() == [[0, 1], [10, 11], [20, 21], [30, 31], [40, 41]]
