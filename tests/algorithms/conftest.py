from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_lib.algorithms import names


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Two prompts, three rollouts each, four tokens, and what an independent implementation made of them."""
    return json.loads((Path(__file__).parent / "core_algos_small.json").read_text())


@pytest.fixture
def _restored_tables():
    tables = (names.ADV_ESTIMATORS, names.POLICY_LOSSES)
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)
