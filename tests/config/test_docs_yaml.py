"""Configurations shown in the documentation load, and act in full."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ppo_lib.config import load_config

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    (page.name, number, block)
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


def test_there_are_some():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize(("page", "number", "block"), BLOCKS, ids=[f"{page}-{number}" for page, number, _ in BLOCKS])
def test_a_configuration_in_the_documentation_loads_without_a_notice(page, number, block, tmp_path):
    file = tmp_path / "shown.yaml"
    file.write_text(block)
    notices = load_config(file).notices
    assert [line for line in notices if "rollout.n=1" not in line] == []
