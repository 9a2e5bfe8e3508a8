"""The page of all algorithms says what the tables say."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppo_lib.algorithms import names
from ppo_lib.config.algorithm import AlgorithmConfig

ROOT = Path(__file__).parents[2]
GENERATOR = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "generate_algorithms.py")))


def test_the_page_is_current():
    current = GENERATOR.PAGE.read_text(encoding="utf-8") == GENERATOR.page()
    assert current, f"docs/algorithms.md is stale; run: {GENERATOR.COMMAND}"


@pytest.mark.parametrize(
    ("heading", "row"),
    [("Advantage", row) for row in names.ADV_ESTIMATORS.values()]
    + [("Policy", row) for row in names.POLICY_LOSSES.values()],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_algorithm_is_told_with_formula_paper_and_use(heading, row):
    section = GENERATOR.page().partition(f"\n## {heading}")[2].partition("\n## ")[0]
    entry = next(part for part in section.split("\n### ") if f"`{row.name}`" in part.partition("\n")[0])
    for text in (row.formula, row.paper, row.when):
        assert text
        assert text in entry


def test_what_an_estimator_needs_is_told_in_words_and_its_settings_exist():
    for row in names.ADV_ESTIMATORS.values():
        assert row.needs | row.uses <= GENERATOR.NEEDS.keys()
        assert row.settings <= AlgorithmConfig.model_fields.keys()


@pytest.mark.parametrize(
    "table", [names.LOSS_AGG_MODES, names.KL_PENALTIES, names.KL_FROM_LOGITS, names.KL_CONTROLLERS]
)
def test_every_other_name_has_a_line(table):
    for name in table:
        assert f"| `{name}` | " in GENERATOR.page()
