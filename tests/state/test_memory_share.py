"""How a limit for memory is written, and how much of it is free for mirrors."""

import pytest

from ttprun.state.cost_limits import in_words, parse_memory


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("4GiB", 4 << 30),
        ("500 MiB", 500 << 20),
        ("1.5KiB", 1536),
        ("1000000", 1000000),
        ("0", 0),
        ("25%", 0.25),
        ("0.25", 0.25),
        ("100%", 1.0),
    ],
)
def test_bytes_are_whole_numbers_and_shares_are_fractions(text: str, limit: float) -> None:
    found = parse_memory(text)

    assert found == limit
    assert type(found) is type(limit)


@pytest.mark.parametrize("text", ["", "4GB", "a quarter", "-1", "150%", "1.5", "nan"])
def test_what_is_no_amount_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount of memory; write 4GiB"):
        parse_memory(text)


def test_bytes_are_said_in_the_largest_unit_that_leaves_more_than_one() -> None:
    assert [in_words(size) for size in (812, 1536, 3 << 20, 5 << 40)] == ["812 B", "1.5 KiB", "3.0 MiB", "5.0 TiB"]
