"""The metrics file is one whole line a step, whatever happened before."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys

import pytest

from ppo_lib.errors import ConfigError
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


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_that_is_not_installed_gives_one_warning_and_is_left_out(tmp_path, caplog):
    run = tracking(tmp_path, logger=("file", "wandb"))
    run.log({"x": 1.0}, 1)
    run.close()
    (record,) = caplog.records
    assert record.getMessage() == "trainer.logger names wandb, which is not installed: this run is not logged there"
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 1.0}]


# The two services, as far as the backends call them: a package that notes the calls stands in for each.
WANDB = """
calls = []

class Run:
    def log(self, metrics, step):
        calls.append(("log", metrics, step))

    def finish(self):
        calls.append(("finish",))

def init(project, name, config):
    calls.append(("init", project, name, config))
    return Run()
"""
MLFLOW = """
calls = []

def set_experiment(name):
    calls.append(("experiment", name))

def start_run(run_name):
    calls.append(("run", run_name))

def log_params(params):
    calls.append(("params", params))

def log_metrics(metrics, step):
    calls.append(("log", metrics, step))

def end_run():
    calls.append(("end",))
"""


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Puts a package of that name first on the path; gives the package."""

    def install(name, text):
        (tmp_path / "packages").mkdir(exist_ok=True)
        (tmp_path / "packages" / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    yield install
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


def logged(tmp_path, name):
    run = Tracking([name], tmp_path, "p", "e", {"trainer": {"seed": 3}})
    run.log({"val-core/d/acc/mean@1": 0.5}, 7)
    run.close()


def test_wandb_gets_project_name_configuration_and_steps(tmp_path, service):
    wandb = service("wandb", WANDB)
    logged(tmp_path, "wandb")
    assert wandb.calls == [
        ("init", "p", "e", {"trainer": {"seed": 3}}),
        ("log", {"val-core/d/acc/mean@1": 0.5}, 7),
        ("finish",),
    ]


def test_mlflow_gets_the_configuration_as_parameters_and_names_it_can_take(tmp_path, service):
    mlflow = service("mlflow", MLFLOW)
    logged(tmp_path, "mlflow")
    assert mlflow.calls == [
        ("experiment", "p"),
        ("run", "e"),
        ("params", {"trainer.seed": 3}),
        ("log", {"val-core/d/acc/mean_at_1": 0.5}, 7),
        ("end",),
    ]


def test_a_service_that_cannot_start_is_one_message_and_leaves_nothing_open(tmp_path, service):
    service("wandb", "def init(**_):\n    raise RuntimeError('No API key configured.\\nmore')\n")
    with pytest.raises(
        ConfigError, match=r"^trainer\.logger names wandb, which cannot start: No API key configured\.$"
    ):
        tracking(tmp_path, logger=("file", "wandb"))


def test_tensorboard_holds_the_scalars(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    run = tracking(tmp_path, logger=("tensorboard",))
    run.log({"critic/score/mean": 0.25}, 7)
    run.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(7, 0.25)]
