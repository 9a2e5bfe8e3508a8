"""What each built-in scorer gives full, partial and no credit for."""

from __future__ import annotations

import pytest

from ppo_lib.reward import default_compute_score
from ppo_lib.reward.scorers import arithmetic, gsm8k, repeat_digit


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("so it is 72\n#### 72", "72", 1, 1),
        ("#### 1,200", "1200", 1, 1),
        ("#### $1,200.", "1200", 1, 1),
        ("#### -3", "-3", 1, 1),
        ("#### 72.00", "72", 1, 1),
        ("The answer is 72.", "72", 0, 1),
        ("The answer is $72", "72", 0, 1),
        ("#### 7 and then #### 72", "72", 1, 1),  # the last one counts
        ("#### 72 or rather 73", "72", 1, 0),
        ("####72", "72", 0, 1),
        ("72 eggs", "72", 0, 1),
        ("#### seventy-two", "72", 0, 0),
        ("no number ... at all,", "72", 0, 0),
        ("#### 1.2.3", "1.2.3", 1, 1),
        ("", "72", 0, 0),
        ("#### 72" + "x" * 300, "72", 0, 0),  # only the end is searched
    ],
)
def test_gsm8k_strict_wants_the_mark_and_flexible_takes_the_last_number(text, truth, strict, flexible):
    assert gsm8k(text, truth) == {"score": strict, "acc": strict}
    assert gsm8k(text, truth, method="flexible") == {"score": flexible, "acc": flexible}


def test_gsm8k_gives_the_format_score_for_a_wrong_answer_but_not_for_none():
    assert gsm8k("#### 7", "72", format_score=0.1) == {"score": 0.1, "acc": 0.0}
    assert gsm8k("7", "72", format_score=0.1) == {"score": 0.0, "acc": 0.0}
    assert gsm8k("#### 72", "72", score=2.0) == {"score": 2.0, "acc": 1.0}
    with pytest.raises(ValueError, match="unknown method 'loose'; expected strict or flexible"):
        gsm8k("", "", method="loose")


@pytest.mark.parametrize(
    ("text", "score"),
    [("12\n", 1), ("12", 0), ("1\n", 0), ("12\n\n", 1), (" 12\n", 0), ("12 \n", 0), ("12<|im_end|>", 0), ("", 0)],
)
def test_arithmetic_wants_the_answer_and_then_a_newline(text, score):
    assert arithmetic(text, "12") == {"score": score, "acc": score}


@pytest.mark.parametrize(
    ("text", "score", "acc"),
    [
        ("77777777", 1.0, 1),
        ("7777777", 7 / 8, 0),
        ("77717777", 7 / 8, 0),
        ("7", 1 / 8, 0),
        ("777777777777", 8 / 12, 0),  # going on costs
        ("<unk>77777777", 0.2, 0),  # 13 characters, three of the first eight are sevens
        ("", 0.0, 0),
    ],
)
def test_repeat_digit_pays_for_each_position(text, score, acc):
    expected = 3 / 13 if text.startswith("<unk>") else score
    assert repeat_digit(text, "77777777") == {"score": pytest.approx(expected), "acc": acc}


def test_the_default_scorer_goes_by_source_and_passes_arguments_on():
    assert default_compute_score("openai/gsm8k", "it is 72.", "72", extra_info={}, method="flexible")["score"] == 1
    with pytest.raises(ValueError, match=r"no scorer for data_source 'openai/gsm8'; did you mean 'openai/gsm8k'\?"):
        default_compute_score("openai/gsm8", "", "")
    with pytest.raises(ValueError, match="custom_reward_function"):
        default_compute_score("something else", "", "")
