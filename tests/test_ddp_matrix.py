"""Every pair of levers equals its reference in one process, with the same bits on both ranks, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddp_matrix import Result, pairs, results, table

pytestmark = pytest.mark.timeout(600)  # the first test waits for the training of all pairs
PAGE = Path(__file__).parent.parent / "docs" / "ddp-matrix.md"


@pytest.fixture(scope="module")
def every() -> dict[tuple[str, ...], Result]:
    """All pairs in the same two processes: most of the time would go into starting them."""
    return {result.names: result for result in results(list(pairs()))}


@pytest.mark.parametrize("names", list(pairs()), ids=" + ".join)
def test_a_pair_is_right_or_refused(names: tuple[str, ...], every: dict[tuple[str, ...], Result]) -> None:
    result = every[names]
    assert result.ranks_equal
    assert result.difference <= result.tolerance


def test_the_page_shows_what_was_found(every: dict[tuple[str, ...], Result]) -> None:
    assert PAGE.read_text("utf-8") == table(list(every.values())), "run tests/ddp_matrix.py"
