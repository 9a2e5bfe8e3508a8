"""Several Ray nodes, as several raylets on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from runs import PPO, metrics_of, run

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("two_nodes.py")


def on_two_nodes(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), *sys.path])}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=400, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_ranks_on_two_nodes_and_the_death_of_one_node() -> None:
    text = on_two_nodes("groups")
    assert "died during work_for_long: " in text
    assert text.count("after ") == 2


def test_two_nodes_give_the_numbers_of_one_rank(tmp_path: Path) -> None:
    on_two_nodes("train", str(tmp_path / "two"))
    expected = run(tmp_path / "one", *PPO)
    found = metrics_of(tmp_path / "two")
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected):
        for name, value in theirs.items():
            if name.startswith(("actor/", "critic/")):
                assert ours[name] == pytest.approx(value, rel=1e-4, abs=2e-6), name
