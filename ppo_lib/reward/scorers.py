"""Scorers by `data_source`. Each takes the decoded response and the ground truth, and is a pure function of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

Score = dict[str, Any]

MARKED_NUMBER = re.compile(r"#### (-?\$?[0-9.,]*[0-9][0-9.,]*)")
NUMBER = re.compile(r"-?[0-9.,]*[0-9][0-9.,]*")
# Only the end of a response is searched: a final answer stands there, and a response may be very long.
SEARCHED_CHARACTERS = 300


def gsm8k(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> Score:
    """`score` for the right final answer, `format_score` for a wrong one, 0 where there is none.

    `method="strict"`: the answer is the last number written as `#### 72`. `method="flexible"`: the last number in the
    response. Numbers are compared by value, without thousands separators, dollar signs and a full stop at the end.
    Only the last 300 characters count. Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems".
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"unknown method {method!r}; expected strict or flexible")
    found = (MARKED_NUMBER if method == "strict" else NUMBER).findall(solution_str[-SEARCHED_CHARACTERS:])
    if not found:
        return {"score": 0.0, "acc": 0.0}
    right = _number(found[-1]) == _number(str(ground_truth))
    return {"score": score if right else format_score, "acc": float(right)}


def _number(text: str) -> Decimal | str:
    plain = text.replace(",", "").replace("$", "").strip().rstrip(".")
    try:
        return Decimal(plain)
    except InvalidOperation:  # such as "1.2.3": equal only to itself
        return plain


def arithmetic(solution_str: str, ground_truth: str) -> Score:
    """1 if the response is the answer followed by a newline, else 0.

    The newline is how the response says that it is done: without it `12` would pass for `1`, and a policy that never
    stops would pass too. Nothing before the answer is allowed; what follows the newline is not looked at.
    """
    right = float(solution_str.startswith(f"{ground_truth}\n"))
    return {"score": right, "acc": right}


def repeat_digit(solution_str: str, ground_truth: str) -> Score:
    """The share of positions that hold the right character, out of those wanted or those written, whichever are more.

    Partial credit is what a model of random weights can start from: eight digits right at once never happen by chance.
    `acc` is 1 for the whole answer only.
    """
    matches = sum(given == wanted for given, wanted in zip(solution_str, ground_truth))
    return {
        "score": matches / max(len(solution_str), len(ground_truth)),
        "acc": float(solution_str == ground_truth),
    }


SCORERS: dict[str, Callable[..., Score]] = {
    "openai/gsm8k": gsm8k,
    "arithmetic": arithmetic,
    "repeat-digit": repeat_digit,
}


def unknown_source(data_source: str) -> str:
    """What to say about a `data_source` that no scorer is for."""
    near = difflib.get_close_matches(data_source, SCORERS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"no scorer for data_source {data_source!r}; {hint}there are {', '.join(SCORERS)}. "
        "Set reward.custom_reward_function.path to a scorer of your own"
    )


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Score:
    """Score by the scorer of `data_source`; `kwargs` go to it. Raises `ValueError` for a source that has none."""
    if data_source not in SCORERS:
        raise ValueError(unknown_source(data_source))
    return SCORERS[data_source](solution_str, ground_truth, **kwargs)
