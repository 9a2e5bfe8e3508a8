"""Tasks that need no file: `builtin:arithmetic` and `builtin:repeat-digit`, each with a training and a validation part.

Both are the same rows on every machine, and each says in one line what is scored (see `ppo_lib.reward.scorers`).
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable
from typing import Any

from ppo_lib.errors import DataError

PREFIX = "builtin:"
TRAIN, VALIDATION = "train", "validation"

SHOWN = ("2+3=5", "9-1=8", "4+5=9")
HELD_OUT = 32
DIGITS_REPEATED = 8
ROWS_PER_DIGIT = 16


def arithmetic(split: str) -> list[dict[str, Any]]:
    """One-digit sums, and differences that are not negative: 155 problems, 123 for training and 32 for validation.

    The prompt shows three solved problems and one to solve, a line each: a base model of 135M parameters continues it
    with the right answer one time in four, where it fails on the same problem asked as a chat. A full score needs the
    answer and then a newline. The parts share no problem, and the three that are shown are never held out.
    """
    problems = [(f"{x}+{y}=", x + y) for x in range(10) for y in range(10)]
    problems += [(f"{x}-{y}=", x - y) for x in range(10) for y in range(x + 1)]
    # By a hash, not by a random generator: the same choice whatever the version of Python.
    shuffled = sorted(problems, key=lambda problem: hashlib.sha256(problem[0].encode()).digest())
    shown = {line[: line.index("=") + 1] for line in SHOWN}
    held_out = [problem for problem in shuffled if problem[0] not in shown][:HELD_OUT]
    part = held_out if split == VALIDATION else [problem for problem in shuffled if problem not in held_out]
    start = "".join(line + "\n" for line in SHOWN)
    return [_row("arithmetic", start + question, str(answer), split, i) for i, (question, answer) in enumerate(part)]


def repeat_digit(split: str) -> list[dict[str, Any]]:
    """`7:` is to be answered `77777777`: what half a million random weights learn from reward alone in seconds.

    There are only ten prompts. Training holds each 16 times, so that an epoch is several batches; validation holds
    each once. The score is the share of the eight positions that are right.
    """
    digits = [digit for _ in range(1 if split == VALIDATION else ROWS_PER_DIGIT) for digit in "0123456789"]
    return [_row("repeat-digit", f"{d}:", d * DIGITS_REPEATED, split, i) for i, d in enumerate(digits)]


TASKS: dict[str, Callable[[str], list[dict[str, Any]]]] = {"arithmetic": arithmetic, "repeat-digit": repeat_digit}


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of `builtin:TASK/train` or `builtin:TASK/validation`; `builtin:TASK` alone is the training part."""
    task, _, split = name.removeprefix(PREFIX).partition("/")
    if task not in TASKS or split not in ("", TRAIN, VALIDATION):
        known = [f"{PREFIX}{each}" for each in TASKS]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
        raise DataError(f"there is no built-in data set {name!r}; {hint}")
    return TASKS[task](split or TRAIN)


def with_split(name: str, is_train: bool) -> str:
    """`builtin:TASK` with the part that the setting it stands in asks for; any other name unchanged."""
    if not name.startswith(PREFIX) or "/" in name:
        return name
    return f"{name}/{TRAIN if is_train else VALIDATION}"


def _row(source: str, prompt: str, answer: str, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": "math" if source == "arithmetic" else "copy",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }
