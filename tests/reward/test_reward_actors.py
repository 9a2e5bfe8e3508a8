"""Scoring in Ray actors: the same answers and errors, and a process that hangs or dies ends the run, not the driver."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
from reward_testing import batch_of, reward_config, sample

from ppo_lib.errors import RewardError
from ppo_lib.reward import RewardLoopManager, RewardResult

SCORER = """
import os, signal, threading, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "die":
        os._exit(1)
    if solution_str == "hang":
        threading.Event().wait()
    if solution_str == "none":
        return None
    if solution_str == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(5)
        except TimeoutError:
            return {"score": 0.5, "alarmed": True}
    return {"score": float(solution_str), "pid": os.getpid()}

async def judge(data_source, solution_str, ground_truth, extra_info):
    import asyncio
    await asyncio.sleep(0.3)
    return {"score": 1.0, "torch": "torch" in __import__("sys").modules}
"""

pytestmark = pytest.mark.usefixtures("ray_cluster")


def score(manager, *samples):
    async def run():
        return await asyncio.gather(*[manager.score(each) for each in samples])

    return asyncio.run(run())


@pytest.fixture
def make(tokenizer, scorer_file, no_leftovers):
    made = []

    def build(**settings):
        made.append(RewardLoopManager(reward_config(scorer_file(SCORER), **settings), tokenizer))
        return made[-1]

    yield build
    for manager in made:
        manager.close()


def test_actors_share_the_work_and_a_handle_shares_the_actors(make):
    import os
    import pickle

    manager = make(num_workers=2)
    results = score(manager, *[sample(str(i), uid=str(i)) for i in range(20)])
    assert [result.score for result in results] == list(range(20))
    pids = {result.extra["pid"] for result in results}
    assert len(pids) == 2
    assert os.getpid() not in pids

    handle = pickle.loads(pickle.dumps(manager))
    assert {r.extra["pid"] for r in score(handle, *[sample(str(i)) for i in range(6)])} == pids
    handle.close()  # not its actors to end
    assert score(manager, sample("1"))[0].score == 1.0


@pytest.mark.parametrize("timeout_s", [None, 20])
def test_errors_alarms_and_deaths(make, tokenizer, timeout_s):
    manager = make(num_workers=1, timeout_s=timeout_s)
    assert score(manager, sample("alarm"))[0] == RewardResult(0.5, {"alarmed": True})
    with pytest.raises(RewardError, match=r"sample u7 .*ValueError: could not convert .*: 'x'.*scorer\.py"):
        score(manager, sample("x"))
    with pytest.raises(RewardError, match="returned None"):
        score(manager, sample("none"))
    rm_scores, extra = manager.score_batch(batch_of(tokenizer, ["1", "2"], ["", ""]))
    assert rm_scores.sum(-1).tolist() == [1.0, 2.0]
    assert len(set(extra["pid"])) == 1
    with pytest.raises(RewardError, match=r"sample u7 .*its reward worker process died"):
        score(manager, sample("die"))


def test_a_hanging_scorer_is_left_in_time_and_its_process_ended(make, no_leftovers):
    before = no_leftovers.busy_workers()
    manager = make(num_workers=1, timeout_s=0.5)
    assert score(manager, sample("1"))[0].score == 1.0  # the actor is up: what follows is the scorer's own time
    begin = time.monotonic()
    with pytest.raises(RewardError, match=r"took longer than reward\.timeout_s=0\.5 seconds"):
        score(manager, sample("hang"), sample("1"))
    assert time.monotonic() - begin < 5
    workers = no_leftovers.busy_workers() - before
    assert workers
    manager.close()
    assert no_leftovers.survivors(workers) == set()


def test_async_scorers_run_together_in_an_actor_that_never_loaded_torch(make, scorer_file, tokenizer, no_leftovers):
    manager = RewardLoopManager(reward_config(scorer_file(SCORER), name="judge", num_workers=1), tokenizer)
    score(manager, sample())
    begin = time.monotonic()
    results = score(manager, *[sample(uid=str(i)) for i in range(16)])
    assert time.monotonic() - begin < 2.4  # half of what they take one after the other
    assert {result.extra["torch"] for result in results} == {False}
    manager.close()


def test_a_scorer_given_as_a_function_goes_to_the_actors(tokenizer, no_leftovers):
    bonus = 2.0

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return bonus

    manager = RewardLoopManager(reward_config(num_workers=1), tokenizer, compute_score=compute_score)
    assert score(manager, sample())[0].score == 2.0
    manager.close()


def test_actors_without_ray_are_refused_and_null_means_this_process():
    program = """
import asyncio
from ppo_lib.config import RewardConfig
from ppo_lib.errors import ConfigError
from ppo_lib.reward import RewardLoopManager, RewardSample
try:
    RewardLoopManager(RewardConfig(num_workers=2), None)
except ConfigError as error:
    print(error)
manager = RewardLoopManager(RewardConfig(), None)
print(asyncio.run(manager.score(RewardSample("arithmetic", [], "5", solution_str="5\\n"))).score)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "reward.num_workers=2 needs Ray, which is not running; set it to 0 to score here.",
        "1.0",
    ], done.stderr
