"""The metrics file is one whole line a step, whatever happened before."""

from __future__ import annotations

import json
import warnings

import pytest

from ppo_lib.trainer.tracking import Tracking


def tracking(tmp_path, resumed_step: int = 0, logger: tuple[str, ...] = ("file",)) -> Tracking:
    return Tracking(list(logger), tmp_path, "p", "e", {}, resumed_step)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_a_step_and_non_finite_values_are_null(tmp_path):
    run = tracking(tmp_path)
    run.log({"a": 1.5, "b": float("nan")}, 1)
    run.log({"a": float("inf")}, 2)
    run.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1.5, "b": None}, {"step": 2, "a": None}]


def test_a_resumed_run_rewrites_what_came_after_and_drops_a_torn_line(tmp_path):
    run = tracking(tmp_path)
    for step in (1, 2, 3):
        run.log({"x": step}, step)
    run.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x"')
    run = tracking(tmp_path, resumed_step=2)
    run.log({"x": 30}, 3)
    run.close()
    assert [(line["step"], line["x"]) for line in lines(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 2), (3, 30)]


def test_a_new_run_sets_the_older_file_aside(tmp_path):
    for value in (1, 2, 3):
        run = tracking(tmp_path)
        run.log({"x": value}, 1)
        run.close()
    found = {path.name: lines(path)[0]["x"] for path in tmp_path.glob("metrics*.jsonl")}
    assert found == {"metrics.1.jsonl": 1, "metrics.2.jsonl": 2, "metrics.jsonl": 3}


def test_a_logger_that_is_not_installed_gives_one_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="wandb, which is not installed"):
            tracking(tmp_path, logger=("wandb",))


def test_tensorboard_holds_the_scalars(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    run = tracking(tmp_path, logger=("tensorboard",))
    run.log({"critic/score/mean": 0.25}, 7)
    run.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(7, 0.25)]
