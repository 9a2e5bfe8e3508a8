"""Where the metrics of a step go: console, TensorBoard, a JSON-lines file, wandb or mlflow where installed."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from ppo_lib.config.tree import dotted, leaves
from ppo_lib.errors import ConfigError

logger_of_notices = logging.getLogger("ppo_lib.config")

SERVICES = ("wandb", "mlflow")
METRICS_FILE = "metrics.jsonl"
CONSOLE_METRICS = {  # what a reader wants on one line; the file and TensorBoard have everything
    "critic/score/mean": "score",
    "response_length/mean": "length",
    "actor/entropy": "entropy",
    "actor/pg_loss": "pg_loss",
    "actor/grad_norm": "grad_norm",
    "actor/ppo_kl": "ppo_kl",
    "critic/vf_loss": "vf_loss",
    "timing_s/step": "seconds",
}


class Backend(Protocol):
    """One destination. `log` gets every metric of a step at once; `close` may be called twice."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record all metrics of one step."""

    def close(self) -> None:
        """Flush and release."""


class ConsoleBackend:
    """One short line a step, written above the progress bar."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the main metrics, and every `val-core` one."""
        shown = {short: metrics[name] for name, short in CONSOLE_METRICS.items() if name in metrics}
        shown |= {name: value for name, value in metrics.items() if name.startswith("val-core/")}
        tqdm.write(f"step {step:>4} | " + " | ".join(f"{name} {value:.4g}" for name, value in shown.items()))

    def close(self) -> None:
        """Nothing is held open."""


def tensorboard_dir(directory: Path) -> Path:
    """Where TensorBoard's files go: `$TENSORBOARD_DIR`, or `tensorboard/` beside the checkpoints."""
    return Path(os.environ.get("TENSORBOARD_DIR", directory / "tensorboard"))


class TensorBoardBackend:
    """Scalars in `tensorboard_dir`."""

    def __init__(self, directory: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(tensorboard_dir(directory)))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is buffered."""
        self.writer.close()


class FileBackend:
    """`metrics.jsonl`: one whole line of JSON a step, flushed at once.

    A run that resumes at step s keeps the lines up to s and rewrites what came after; a new run sets an older file
    aside under the next free number instead of mixing two runs. NaN and infinities are written as null: JSON has
    neither.
    """

    def __init__(self, directory: Path, resumed_step: int = 0):
        self.path = directory / METRICS_FILE
        directory.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._keep(resumed_step) if resumed_step else self._set_aside()
        self.file = self.path.open("a", encoding="utf-8")

    def _keep(self, step: int) -> None:
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        os.replace(aside, self.path)

    def _set_aside(self) -> None:
        n = 1
        while (older := self.path.with_name(f"metrics.{n}.jsonl")).exists():
            n += 1
        self.path.rename(older)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the line."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, **finite}) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class WandbBackend:
    """Weights & Biases, as the environment is logged in."""

    def __init__(self, project: str, experiment: str, config: dict[str, Any]):
        import wandb

        self.run = wandb.init(project=project, name=experiment, config=config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one step."""
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class MlflowBackend:
    """MLflow, at the tracking URI of the environment; the configuration is the run's parameters."""

    def __init__(self, project: str, experiment: str, config: dict[str, Any]):
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(project)
        mlflow.start_run(run_name=experiment)
        mlflow.log_params({dotted(path): value for path, value in leaves(config)})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one step; MLflow refuses '@' in names."""
        self.mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """End the run."""
        self.mlflow.end_run()


class Tracking:
    """All the backends that `trainer.logger` names; one whose package is missing gives a warning and is left out.

    Raises `ConfigError` if wandb or mlflow is there and cannot start: no account, no server.
    """

    def __init__(
        self,
        logger: Sequence[str],
        directory: str | Path,
        project: str,
        experiment: str,
        config: dict[str, Any],
        resumed_step: int = 0,
    ):
        directory = Path(directory).expanduser()
        make: dict[str, Callable[[], Backend]] = {
            "console": ConsoleBackend,
            "tensorboard": lambda: TensorBoardBackend(directory),
            "file": lambda: FileBackend(directory, resumed_step),
            "wandb": lambda: WandbBackend(project, experiment, config),
            "mlflow": lambda: MlflowBackend(project, experiment, config),
        }
        self.backends: list[Backend] = []
        for name in logger:
            if name in SERVICES and importlib.util.find_spec(name) is None:
                logger_of_notices.warning(
                    "trainer.logger names %s, which is not installed: this run is not logged there", name
                )
                continue
            try:
                self.backends.append(make[name]())
            except Exception as error:
                self.close()
                if name not in SERVICES:
                    raise
                said = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ConfigError(f"trainer.logger names {name}, which cannot start: {said}") from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the metrics of one step to every backend."""
        for backend in self.backends:
            backend.log(metrics, step)

    def close(self) -> None:
        """Close every backend."""
        for backend in self.backends:
            backend.close()


def _step_of(line: str) -> float:
    """The step of a line; a torn line (a run killed in mid-write) belongs to no step."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
