from __future__ import annotations

from pathlib import Path

import pytest
from workers_exactness import CASES, STEPS, difference

TABLE = Path(__file__).parents[2] / "docs" / "exactness.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_after_twenty_steps_every_parameter_is_that_of_one_plain_rank(name: str, tiny_model: str) -> None:
    found = difference(CASES[name], tiny_model, STEPS)
    assert found.parameters <= 1e-4, found.where
    assert found.metrics <= 1e-3
    assert found.moved > 0.01  # there was something to differ in


def test_the_page_shows_every_case() -> None:
    rows = {line.split("|")[1].strip() for line in TABLE.read_text().splitlines() if line.startswith("| ")}
    assert rows >= CASES.keys()
