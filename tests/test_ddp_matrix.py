"""Every pair of levers equals its reference in one process, with the same bits on both ranks, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddp_matrix import Result, pairs, refusal, results, table

PAGE = Path(__file__).parent.parent / "docs" / "ddp-matrix.md"
PAIRS = list(pairs())
FEWER = [names for number, names in enumerate(PAIRS) if "plain" in names or number % 4 == 0]
"""Each lever alone, and a part of the pairs: all take minutes."""

pytestmark = pytest.mark.timeout(900)  # the first test waits for the training of all pairs


@pytest.fixture(scope="module")
def fewer() -> dict[tuple[str, ...], Result]:
    """In the same two processes: most of the time would go into starting them."""
    return {result.names: result for result in results(FEWER)}


@pytest.mark.parametrize("names", FEWER, ids=" + ".join)
def test_a_pair_is_right_or_refused(names: tuple[str, ...], fewer: dict[tuple[str, ...], Result]) -> None:
    result = fewer[names]
    assert result.ranks_equal
    assert result.difference <= result.tolerance


@pytest.mark.slow
def test_every_pair_is_right_or_refused() -> None:
    for result in results(PAIRS):
        assert result.ranks_equal, result
        assert result.difference <= result.tolerance, result


def test_the_page_shows_what_is_right_and_what_is_refused() -> None:
    every = [Result(names, refusal(names)) for names in PAIRS]
    assert PAGE.read_text("utf-8") == table(every), "run tests/ddp_matrix.py"
