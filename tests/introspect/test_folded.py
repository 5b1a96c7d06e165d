"""Large tensors on a device are hashed by sums of their rows, which are computed there."""

from __future__ import annotations

import pytest
import torch

from ttprun.introspect.tensor_bytes import _BLOCK, _ROW, bytes_of, content_of, folded


def sums(tensor: torch.Tensor) -> list[int]:
    found: list[int] = folded(tensor).tolist()
    return found


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
)
def test_a_flipped_bit_anywhere_changes_the_sum_of_its_row_alone(dtype: torch.dtype) -> None:
    count = 3 * _ROW + 17
    tensor = torch.randint(0, 2, (count,)).to(dtype)
    before = sums(tensor)

    for at in (0, _ROW + 1, count - 1):
        changed = tensor.clone()
        whole = changed.view(torch.uint8)
        byte = at * tensor.element_size()
        whole[byte] ^= 1
        after = sums(changed)
        assert len(after) == len(before)
        assert sum(here != there for here, there in zip(before, after, strict=True)) == 1

    assert sums(tensor.clone()) == before


def test_exchanged_elements_and_signs_of_zeros_change_it() -> None:
    tensor = torch.arange(float(_ROW))
    exchanged = tensor.clone()
    exchanged[[4, 9]] = exchanged[[9, 4]]
    negative = tensor.clone()
    negative[0] = -0.0

    assert len({tuple(sums(one)) for one in (tensor, exchanged, negative, tensor[:-1])}) == 4


def test_elements_are_read_in_order_whatever_the_strides_are() -> None:
    tensor = torch.randn(300, 200)

    assert sums(tensor.T) == sums(tensor.T.contiguous())
    assert sums(tensor.T) != sums(tensor)


def test_several_blocks_are_one_after_the_other() -> None:
    tensor = torch.randint(0, 255, (_BLOCK + _ROW + 1,), dtype=torch.uint8)

    assert sums(tensor) == sums(tensor[:_BLOCK]) + sums(tensor[_BLOCK:])
    assert sums(tensor[:0]) == []


def test_what_the_cpu_holds_is_hashed_as_it_is() -> None:
    tensor = torch.randn(1 << 20)

    assert content_of(tensor) == bytes_of(tensor)
