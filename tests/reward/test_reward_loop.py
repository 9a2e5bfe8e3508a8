"""Scoring in this process: what a scorer may return, what happens when it does not, and that nothing is held up."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from reward_testing import batch_of, reward_config, sample

from ppo_lib.errors import ConfigError, FieldMissingError, RewardError
from ppo_lib.reward import RewardLoopManager, RewardResult, decode_response, load_reward_fn, place_scores


@pytest.fixture
def make(tokenizer):
    """A reward loop that is closed at the end of the test."""
    made = []

    def build(config=None, fn=None) -> RewardLoopManager:
        made.append(RewardLoopManager(config or reward_config(), tokenizer, compute_score=fn))
        return made[-1]

    yield build
    for manager in made:
        manager.close()


def returns(value):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return value

    return compute_score


def score(manager, *samples):
    async def run():
        return await asyncio.gather(*[manager.score(each) for each in samples or [sample()]])

    results = asyncio.run(run())
    return results if samples else results[0]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1, RewardResult(1.0)),
        (True, RewardResult(1.0)),
        (np.float32(0.5), RewardResult(0.5)),
        (np.bool_(True), RewardResult(1.0)),
        (np.array(0.25), RewardResult(0.25)),
        (torch.tensor(0.25), RewardResult(0.25)),
        ({"score": 0.5}, RewardResult(0.5)),
        ({"score": 0, "acc": True, "why": "x"}, RewardResult(0.0, {"acc": True, "why": "x"})),
    ],
)
def test_a_scorer_may_return_any_number_or_a_dict_with_one(make, returned, expected):
    result = score(make(fn=returns(returned)))
    assert result == expected
    assert type(result.score) is float


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned None; expected a number or a dict with 'score'"),
        (float("nan"), "returned nan; expected a finite number"),
        (float("inf"), "returned inf; expected a finite number"),
        (torch.tensor(float("nan")), "returned nan; expected a finite number"),
        ("1.0", "returned a str"),
        ([1.0], "returned a list"),
        ((1.0, {}), "returned a tuple"),
        (torch.zeros(2), "returned a Tensor"),
        ({"reward": 1}, "returned a dict without 'score'; it has reward"),
        ({}, "returned a dict without 'score'; it has nothing"),
        ({"score": None}, "returned None"),
        ({"score": float("nan")}, "returned nan"),
        ({"score": "1"}, "returned a str"),
        ({"score": 1, "advantages": 2}, "returned 'advantages', which the batch holds under that name already"),
    ],
)
def test_anything_else_is_an_error_that_names_sample_source_and_cause(make, returned, said):
    with pytest.raises(RewardError) as caught:
        score(make(fn=returns(returned)))
    message = str(caught.value)
    for part in (said, "u7", "dataset row 3", "'mine'"):
        assert part in message
    assert "\n" not in message


def test_a_scorer_that_raises_is_an_error_with_its_line_and_the_original_as_cause(make, scorer_file):
    path = scorer_file("""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return 1 / int(solution_str)
    """)
    manager = make(reward_config(path))
    assert score(manager, sample("4"))[0].score == 0.25
    with pytest.raises(RewardError) as caught:
        score(manager, sample("0"))
    assert "ZeroDivisionError: division by zero" in str(caught.value)
    assert "scorer.py, line 3, in compute_score" in str(caught.value)
    assert "The response ends with '0'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert score(manager, sample("4"))[0].score == 0.25  # the next sample is scored as before


def test_a_scorer_that_exits_is_an_error_and_not_the_end_of_the_process(make):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        sys.exit(3)

    with pytest.raises(RewardError, match="SystemExit: 3"):
        score(make(fn=compute_score))


def test_a_scorer_gets_the_row_and_its_own_arguments(make, scorer_file):
    path = scorer_file("""
        def mine(solution_str, ground_truth, data_source, extra_info, weight=1.0):
            return {"score": weight, "seen": [data_source, solution_str, ground_truth, extra_info["index"]]}
    """)
    manager = make(reward_config(path, name="mine", reward_fn_kwargs={"weight": 2.5}))
    assert score(manager) == RewardResult(2.5, {"seen": ["mine", "7", "7", 1]})


def test_plain_scorers_run_one_at_a_time_and_async_ones_together(make):
    running, most = [0], {"plain": 0, "async": 0}

    def plain(data_source, solution_str, ground_truth, extra_info):
        running[0] += 1
        most["plain"] = max(most["plain"], running[0])
        time.sleep(0.01)
        running[0] -= 1
        return 1.0

    async def together(data_source, solution_str, ground_truth, extra_info):
        running[0] += 1
        most["async"] = max(most["async"], running[0])
        await asyncio.sleep(0.05)
        running[0] -= 1
        return {"score": 0.5, "acc": 1}

    samples = [sample(uid=str(i)) for i in range(8)]
    assert [r.score for r in score(make(fn=plain), *samples)] == [1.0] * 8
    assert [r.score for r in score(make(fn=together), *samples)] == [0.5] * 8
    assert most == {"plain": 1, "async": 8}


def test_an_async_scorer_that_raises_is_an_error_too(make):
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(0)
        raise KeyError("gone")

    with pytest.raises(RewardError, match="KeyError: 'gone'"):
        score(make(fn=compute_score))


def stuck(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "stuck":
        threading.Event().wait(60)
    return 1.0


async def stuck_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(60)
    return 1.0


async def blocking_async(data_source, solution_str, ground_truth, extra_info):
    time.sleep(3)  # what an async function must not do, and people do
    return 1.0


@pytest.mark.parametrize("fn", [stuck, stuck_async, blocking_async])
def test_a_scorer_that_hangs_holds_nobody_up_beyond_the_limit(make, fn):
    manager = make(reward_config(timeout_s=0.4), fn)
    begin = time.monotonic()
    with pytest.raises(RewardError, match=r"took longer than reward\.timeout_s=0\.4 seconds"):
        score(manager, sample("stuck"), sample("2"), sample("3"))
    assert time.monotonic() - begin < 2.5
    with pytest.raises(RewardError, match="took longer"):  # and whoever comes later does not wait behind it
        score(manager, sample("4"))


def test_the_limit_is_for_one_score_and_not_for_the_wait_before_it(make):
    def slow(data_source, solution_str, ground_truth, extra_info):
        time.sleep(0.1)
        return 1.0

    assert len(score(make(reward_config(timeout_s=0.5), slow), *[sample(uid=str(i)) for i in range(10)])) == 10


def test_a_stuck_scorer_does_not_keep_the_process_from_ending():
    program = """
import asyncio, threading
from ppo_lib.config import RewardConfig
from ppo_lib.errors import RewardError
from ppo_lib.reward import RewardLoopManager, RewardSample

def compute_score(data_source, solution_str, ground_truth, extra_info):
    threading.Event().wait()

manager = RewardLoopManager(RewardConfig(num_workers=0, timeout_s=0.2), None, compute_score)
try:
    asyncio.run(manager.score(RewardSample("s", [], solution_str="x")))
except RewardError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "refused: cannot score sample ? of data_source 's'" in done.stdout


def test_closing_wakes_whoever_still_waits(make):
    manager = make(fn=stuck)

    async def wait_and_close():
        waiting = asyncio.ensure_future(manager.score(sample("stuck")))
        await asyncio.sleep(0.1)
        manager.close()
        manager.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(wait_and_close())
    with pytest.raises(RuntimeError, match="closed"):
        score(manager)


def test_a_batch_gets_its_scores_on_the_last_policy_token_and_its_extras_as_columns(make, tokenizer):
    data = batch_of(tokenizer, ["77777777", "7777", "", "1"], ["77777777"] * 3 + ["11111111"])
    before = {key: value.clone() for key, value in data.batch.items()}
    rm_scores, extra = make().score_batch(data)
    assert rm_scores.dtype == torch.float32
    assert rm_scores.shape == (4, 10)
    expected = torch.zeros(4, 10)
    expected[0, 8], expected[1, 4], expected[3, 1] = 1.0, 0.5, 0.125  # on the end-of-text token
    assert torch.equal(rm_scores, expected)
    assert extra["acc"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert extra["acc"].dtype == object
    assert all(torch.equal(before[key], data.batch[key]) for key in before)


def test_extra_keys_are_the_union_over_rows_with_none_where_a_row_has_none(make, tokenizer):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if solution_str == "a" else {"score": 0.0, f"only_{solution_str}": [1, 2]}

    data = batch_of(tokenizer, ["a", "b", "c"], ["x"] * 3)
    _, extra = make(fn=compute_score).score_batch(data)
    assert {key: column.tolist() for key, column in extra.items()} == {
        "only_b": [None, [1, 2], None],
        "only_c": [None, None, [1, 2]],
    }


def test_padding_rows_are_not_scored(make, tokenizer):
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.append(solution_str)
        return {"score": 1.0, "acc": 1.0}

    data = batch_of(tokenizer, ["a", "b"], ["x"] * 2)
    data.batch["is_padding"] = torch.tensor([False, True])
    rm_scores, extra = make(fn=compute_score).score_batch(data)
    assert seen == ["a"]
    assert rm_scores.sum(-1).tolist() == [1.0, 0.0]
    assert extra["acc"].tolist() == [1.0, None]


def test_the_first_failure_of_a_batch_is_raised_and_names_its_row(make, tokenizer):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return None if solution_str == "b" else 1.0

    with pytest.raises(RewardError, match=r"sample u1 \(dataset row 11\) of data_source 'repeat-digit'"):
        make(fn=compute_score).score_batch(batch_of(tokenizer, ["a", "b", "c"], ["x"] * 3))


def test_a_source_without_scorer_is_an_error_that_says_what_to_set(make, tokenizer):
    data = batch_of(tokenizer, ["a"], ["x"], source="nobody/knows")
    with pytest.raises(RewardError, match=r"no scorer for data_source 'nobody/knows'.*reward\.custom_reward_function"):
        make().score_batch(data)


def test_score_batch_works_where_an_event_loop_runs_already(make, tokenizer):
    manager, data = make(), batch_of(tokenizer, ["77777777"], ["77777777"])

    async def as_in_a_notebook():
        return manager.score_batch(data)

    assert asyncio.run(as_in_a_notebook())[0].sum() == 1.0


def test_a_batch_without_what_scoring_needs_says_what_is_missing(make, tokenizer):
    data = batch_of(tokenizer, ["a"], ["x"])
    data.pop(batch_keys=["response_mask"])
    with pytest.raises(FieldMissingError, match="missing: response_mask"):
        make().score_batch(data)


def test_scores_go_to_the_last_policy_token_and_nowhere_where_there_is_none():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    for kind in (torch.int64, torch.bool, torch.float32):
        placed = place_scores([1.0, 2.0, 3.0, -4.0], mask.to(kind))
        assert placed.tolist() == [[0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, -4]]


def test_decoding_drops_the_end_and_hides_nothing_else(tokenizer):
    ids = tokenizer("77").input_ids
    eos, pad, bos = tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id
    assert decode_response(tokenizer, [*ids, eos]) == "77"
    assert decode_response(tokenizer, [*ids, eos, pad, pad]) == "77"
    assert decode_response(tokenizer, [ids[0], bos, ids[1], eos]) == "7<bos>7"
    assert decode_response(tokenizer, [eos]) == decode_response(tokenizer, []) == ""
    assert decode_response(tokenizer, tokenizer("5 \n").input_ids) == "5 \n"


def test_a_handle_for_another_process_scores_with_the_same_function(make, scorer_file):
    manager = make(reward_config(scorer_file("def compute_score(**kwargs):\n    return 0.75\n")))
    assert score(manager).score == 0.75
    copy = pickle.loads(pickle.dumps(manager))
    assert score(copy).score == 0.75
    copy.close()
    assert score(manager).score == 0.75


@pytest.mark.parametrize(
    ("text", "name", "kwargs", "said"),
    [
        ("def compute_scores(): ...", "compute_score", {}, "has no 'compute_score'; did you mean 'compute_scores'"),
        ("compute_score = 3", "compute_score", {}, "is not a function but a int"),
        ("def compute_score(data): ...", "compute_score", {}, "cannot be called with data_source"),
        (
            "def compute_score(solution_str, ground_truth): ...",
            "compute_score",
            {},
            "cannot be called with data_source",
        ),
        (
            "def f(data_source, solution_str, ground_truth, extra_info): ...",
            "f",
            {"x": 1},
            "and reward_kwargs x: got an unexpected keyword argument 'x'",
        ),
        ("import nothing_of_that_name", "f", {}, "line 1 failed: ModuleNotFoundError"),
        ("def f(:", "f", {}, "failed: SyntaxError"),
    ],
)
def test_a_scorer_that_cannot_be_used_is_refused_when_it_is_loaded(scorer_file, text, name, kwargs, said):
    with pytest.raises(ConfigError) as caught:
        load_reward_fn(reward_config(scorer_file(text), name=name, reward_fn_kwargs=kwargs))
    assert said in str(caught.value)
    assert "reward.custom_reward_function" in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path: there is no file .*absent\.py"):
        load_reward_fn(reward_config(str(tmp_path / "absent.py")))
    with pytest.raises(ConfigError, match="compute_score cannot be called with data_source"):
        RewardLoopManager(reward_config(), tokenizer, compute_score=lambda text: 1.0)


def test_reward_kwargs_reach_the_built_in_scorers(make):
    manager = make(reward_config(reward_fn_kwargs={"method": "flexible"}))
    assert score(manager, sample("it is 72.", "72", "openai/gsm8k"))[0] == RewardResult(1.0, {"acc": 1.0})


def test_classes_with_an_async_call_are_async(make):
    class Judge:
        async def __call__(self, data_source, solution_str, ground_truth, extra_info):
            await asyncio.sleep(0)
            return 0.5

    assert score(make(fn=Judge())).score == 0.5
