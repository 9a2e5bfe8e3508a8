"""The command `ppo_lib`: train, check, config, data. Nothing heavy is imported before it is needed.

ppo_lib train yaml_configs/quickstart.yaml trainer.seed=1
ppo_lib check yaml_configs/quickstart.yaml
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ppo_lib import __version__
from ppo_lib.config import PPOConfig, load_config, step_arithmetic
from ppo_lib.errors import ConfigError
from ppo_lib.trainer.main_ppo import answer_errors, run

__all__ = ["main"]


@answer_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    return options.command(options)


def _train(options: argparse.Namespace) -> int:
    run(_load(options.words))
    return 0


def _check(options: argparse.Namespace) -> int:
    config = _load(options.words)
    print(step_arithmetic(config).table(), flush=True)
    from ppo_lib.trainer.preflight import check_files

    check_files(config)  # the trainer asks again, but only after seconds of imports
    from ppo_lib import RayPPOTrainer
    from ppo_lib.single_controller import available_cores

    trainer = RayPPOTrainer(config)  # checks every row; starts nothing
    for name, loader in (("training", trainer.train_dataloader), ("validation", trainer.val_dataloader)):
        left_out = getattr(loader.dataset, "num_filtered", 0)
        print(f"{len(loader.dataset)} {name} prompts" + (f", {left_out} too long left out" if left_out else ""))
    print(f"{trainer.total_training_steps} steps")
    engine = f"the {trainer.rollout_name} engine"
    print(f"ready to train on {trainer.device_name} with {engine}, {available_cores()} cores here")
    return 0


def _config(options: argparse.Namespace) -> int:
    if options.schema and options.words:
        raise ConfigError(f"the schema is of every file alike; leave out {' '.join(options.words)}")
    text = _schema() if options.schema else _load(options.words).to_yaml()
    if options.output is None:
        print(text, end="")
        return 0
    try:
        Path(options.output).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {options.output}: {error.strerror}") from None
    return 0


def _schema() -> str:
    from ppo_lib.config.schema import json_schema

    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _gsm8k(options: argparse.Namespace) -> int:
    from ppo_lib.data import prepare_gsm8k

    for file in prepare_gsm8k(options.out):
        print(file)
    return 0


def _load(words: Sequence[str]) -> PPOConfig:
    """The configuration that [FILE] [section.key=value ...] describes."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(
            f"one configuration file at a time, got {' and '.join(files)}; a file builds on others with `base:`"
        )
    return load_config(files[0] if files else None, [word for word in words if "=" in word])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ppo_lib", description="PPO-family post-training of language models.")
    parser.add_argument("--version", action="version", version=f"ppo_lib {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("train", _train, "train a model"),
        ("check", _check, "validate a configuration, print the arithmetic of a step, check files and machine"),
        ("config", _config, "print the whole configuration, every default filled in, as YAML"),
    ):
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.add_argument("words", nargs="*", metavar="FILE or section.key=value", help="a YAML file, and overrides")
        sub.set_defaults(command=command)
    config = commands.choices["config"]
    config.add_argument("--schema", action="store_true", help="the JSON Schema of configuration files, for editors")
    config.add_argument("-o", "--output", metavar="FILE", help="write there instead of to the terminal")
    data = commands.add_parser("data", help="prepare a data set").add_subparsers(required=True, metavar="DATASET")
    gsm8k = data.add_parser("gsm8k", help="download GSM8K and write it as parquet")
    gsm8k.add_argument("--out", required=True, metavar="DIR", help="folder for train.parquet and test.parquet")
    gsm8k.set_defaults(command=_gsm8k)
    return parser
