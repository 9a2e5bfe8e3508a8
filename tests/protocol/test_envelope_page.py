"""The page about the envelope is the one that the docstrings make, and its example runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_current_and_says_something_about_every_call():
    page = (DOCS / "envelope.md").read_text()
    assert page == runpy.run_path(str(DOCS / "generate_envelope.py"))["page"](), "run: python docs/generate_envelope.py"
    assert not re.findall(r"^\| `.*` \|\s*\|$", page, re.M)


def test_the_example_runs(capsys):
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "envelope.md").read_text(), re.S):
        exec(compile(block, "envelope.md", "exec"), {})
    assert capsys.readouterr().out.startswith("DataProto of 8 rows")
