"""`python -m ppo_lib.trainer.main_ppo section.key=value ...`: the entry point that launch scripts of this field use.

It takes overrides alone, no file; `ppo_lib train` takes both. Nothing heavy is imported before the configuration holds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

from ppo_lib.config import PPOConfig, load_config
from ppo_lib.errors import ConfigError, PPOLibError

__all__ = ["answer_errors", "main", "run"]

EXPECTED_ERROR = 2
INTERRUPTED = 130

Command = Callable[..., int]


def answer_errors(command: Command) -> Command:
    """A command that answers expected errors with their message on stderr, no traceback, and exit code 2."""

    @functools.wraps(command)
    def answering(arguments: Sequence[str] | None = None) -> int:
        try:
            return command(arguments)
        except PPOLibError as error:
            print(str(error), *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
            return EXPECTED_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED

    return answering


def run(config: PPOConfig) -> dict[str, float]:
    """Check files, then train to the end. Returns the last step's metrics."""
    from ppo_lib.trainer.preflight import check_files

    check_files(config)  # the trainer asks again, but only after seconds of imports
    from ppo_lib.trainer.task_runner import TaskRunner

    return TaskRunner().run(config)


@answer_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Train with overrides from the command line; returns the exit code."""
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    for word in overrides:
        if word.startswith("-") or "=" not in word:
            raise ConfigError(
                f"{word!r} is not an override; write section.key=value. A YAML file goes to `ppo_lib train FILE`"
            )
    run(load_config(overrides=overrides))
    return 0


if __name__ == "__main__":
    sys.exit(main())
