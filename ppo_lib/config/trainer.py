"""Sections `trainer` and `ray_kwargs`: the run itself, and the machines under it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from ppo_lib.config.base import ConfigModel, Frequency, NonNegative, Positive, Seed, follow, one_or_many

LoggerName = Literal["console", "tensorboard", "file", "wandb", "mlflow"]
_Loggers = Annotated[
    tuple[LoggerName, ...],
    BeforeValidator(one_or_many, json_schema_input_type=LoggerName | tuple[LoggerName, ...]),
    AfterValidator(lambda names: tuple(dict.fromkeys(names))),  # twice the same file would hold each line twice
]
_LOCAL_DIR = "checkpoints/{}/{}"


class TrainerConfig(ConfigModel):
    """The run: steps, machines, validation, checkpoints, loggers."""

    total_epochs: Positive = 30
    """Passes over the training data."""
    total_training_steps: Positive | None = None
    """Steps of the run; null is what the epochs give."""
    project_name: str = "verl_examples"
    """Name of the project, for the loggers and the output folder."""
    experiment_name: str = "gsm8k"
    """Name of the experiment, for the loggers and the output folder."""
    logger: _Loggers = ("console", "tensorboard", "file")
    """Where metrics go, one or several; wandb and mlflow where they are installed."""
    log_val_generations: NonNegative = 0
    """Validation samples to keep each time, as jsonl in `val_generations` under `default_local_dir`."""
    rollout_data_dir: str | None = None
    """Folder for every training sample as jsonl; null writes none."""
    validation_data_dir: str | None = None
    """Folder for every validation sample as jsonl; null writes none."""
    nnodes: Positive = 1
    """Machines of the run."""
    n_gpus_per_node: Positive = 8
    """Ranks per machine: GPUs, or processes on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models live; `auto` is cuda where there is a GPU."""
    balance_batch: bool = True
    """Even out tokens over the ranks inside each mini-batch."""
    critic_warmup: NonNegative = 0
    """Steps that train the critic alone before the policy."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    test_freq: Frequency = -1
    """Validate every so many steps and at the end; -1 is never."""
    save_freq: Frequency = -1
    """Save every so many steps and at the end; -1 is never."""
    default_local_dir: str = follow(
        _LOCAL_DIR.format("${trainer.project_name}", "${trainer.experiment_name}"),
        _LOCAL_DIR.format("verl_examples", "gsm8k"),
    )
    """Folder for checkpoints and logs."""
    resume_mode: Literal["disable", "auto", "resume_path"] = "auto"
    """Start anew, from the newest checkpoint of `default_local_dir`, or from `resume_from_path`."""
    resume_from_path: str | None = None
    """A `global_step_N` folder, for `resume_mode: resume_path`."""
    max_actor_ckpt_to_keep: Positive | None = None
    """Newest actor checkpoints to keep; null keeps all."""
    max_critic_ckpt_to_keep: Positive | None = None
    """Newest critic checkpoints to keep; null keeps all."""
    seed: Seed = 42
    """The seed that all others follow."""
    worker_group: Literal["ray", "local"] = "ray"
    """`local` runs one rank in this process: notebooks, debuggers."""
    stage_timeout_s: Annotated[float, Field(gt=0.0)] = 3600.0
    """Seconds that one stage of a step, or the start of the workers, may take."""
    checks: bool = True
    """Hold each stage's output against the field table."""


class RayInitConfig(ConfigModel):
    """Arguments of `ray.init`; those not listed pass through."""

    model_config = ConfigDict(extra="allow")

    num_cpus: Positive | None = None
    """CPUs that Ray may hand out; null is the machine's cores."""
    address: str | None = None
    """A running cluster to join; null starts one here."""
    object_store_memory: Positive | None = None
    """Bytes of the object store; null is 1 GiB on a CPU and Ray's own choice with GPUs."""


class RayKwargsConfig(ConfigModel):
    """The Ray cluster of the run."""

    ray_init: RayInitConfig = RayInitConfig()
    """Arguments of `ray.init`."""
    timeline_json_file: str | None = None
    """Write Ray's timeline of the run to this file at the end."""
