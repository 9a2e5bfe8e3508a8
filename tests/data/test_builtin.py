"""The tasks that need no file are the same everywhere, and what is held out is never shown."""

from __future__ import annotations

import re

import pytest
from data_testing import data_config

from ppo_lib.data import open_data, open_rows
from ppo_lib.errors import DataError
from ppo_lib.reward import default_compute_score


def test_arithmetic_has_123_training_and_32_disjoint_validation_problems_with_right_answers():
    train = open_data("builtin:arithmetic", data_config(), is_train=True)
    held_out = open_data("builtin:arithmetic", data_config(), is_train=False)
    assert (len(train), len(held_out)) == (123, 32)
    seen = set()
    for rows in (train, held_out):
        for i in range(len(rows)):
            row = rows[i]
            shown, question = row["prompt"].rsplit("\n", 1)
            assert shown == "2+3=5\n9-1=8\n4+5=9"
            x, op, y = re.fullmatch(r"(\d)([+-])(\d)=", question).groups()
            assert row["reward_model"]["ground_truth"] == str(int(x) + int(y) if op == "+" else int(x) - int(y))
            assert row["extra_info"]["index"] == i
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            seen.add(question)
    assert len(seen) == 155
    questions = {prompt.rsplit("\n", 1)[1] for prompt in held_out.column("prompt")}
    assert not questions & {"2+3=", "9-1=", "4+5="}
    assert {"+", "-"} == {question[1] for question in questions}


def test_the_held_out_problems_are_these_on_every_machine():
    prompts = open_rows("builtin:arithmetic/validation").column("prompt")
    assert [prompt.rsplit("\n", 1)[1] for prompt in prompts[:4]] == ["8+5=", "3-1=", "4+0=", "4+2="]


def test_repeat_digit_asks_for_every_digit_equally_often():
    train, validation = open_rows("builtin:repeat-digit"), open_rows("builtin:repeat-digit/validation")
    assert (len(train), len(validation)) == (160, 10)
    assert sorted(train.column("prompt")) == sorted(validation.column("prompt") * 16)
    assert validation[7]["prompt"] == "7:"
    assert validation[7]["reward_model"]["ground_truth"] == "77777777"


@pytest.mark.parametrize(("task", "ending"), [("arithmetic", "\n"), ("repeat-digit", "")])
def test_the_right_answer_scores_one_and_no_answer_nothing(task, ending):
    rows = open_rows(f"builtin:{task}")
    for i in range(len(rows)):
        truth = rows[i]["reward_model"]["ground_truth"]
        assert default_compute_score(rows[i]["data_source"], truth + ending, truth) == {"score": 1.0, "acc": 1.0}
        assert default_compute_score(rows[i]["data_source"], "", truth) == {"score": 0.0, "acc": 0.0}


@pytest.mark.parametrize("name", ["builtin:arithmetics", "builtin:arithmetic/test", "builtin:"])
def test_an_unknown_task_or_part_is_refused(name):
    with pytest.raises(DataError, match=r"no built-in data set .*builtin:arithmetic"):
        open_rows(name)
