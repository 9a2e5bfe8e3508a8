"""Faults in the middle of a real run, from the command line over Ray: one clear message, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from runs import GRPO, TINY

RAISES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    raise ZeroDivisionError("no digit to divide by")
"""


class Run:
    """`ppo_lib train` in a process of its own, and every process that it ever started."""

    def __init__(self, folder, *overrides):
        words = [*TINY, *GRPO, "trainer.worker_group=ray", f"trainer.default_local_dir={folder}", *overrides]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ppo_lib", "train", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.started: dict[int, psutil.Process] = {}

    def look(self) -> list[psutil.Process]:
        """The processes below the run now; remembers them."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.started |= {p.pid: p for p in found}
        return found

    def wait_for(self, condition, seconds=240.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            if (result := condition()) is not None:
                return result
            time.sleep(0.2)
        self.process.kill()
        raise AssertionError(f"not seen within {seconds:g} s; the run printed:\n{self.process.stdout.read()}")

    def end(self) -> tuple[int, str]:
        """Exit code and output, once it has ended and everything it started is gone too."""
        code = self.wait_for(self.process.poll)
        output = self.process.stdout.read()
        deadline = time.monotonic() + 20.0
        while (left := [p for p in self.started.values() if is_alive(p)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, f"left running: {left}\n{output}"
        return code, output


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def worker_of(run: Run, title: str):
    """A condition: the Ray actor whose process title starts like this, once it is there."""

    def condition():
        for process in run.look():
            try:
                if process.name().startswith(title) or " ".join(process.cmdline()).startswith(title):
                    return process
            except psutil.Error:
                continue
        return None

    return condition


def test_a_reward_function_that_raises_stops_the_run_with_sample_source_and_cause(tmp_path):
    scorer = tmp_path / "scorer.py"
    scorer.write_text(RAISES)
    code, output = Run(tmp_path, f"reward.custom_reward_function.path={scorer}").end()
    assert code == 2, output
    assert "repeat-digit" in output
    assert "no digit to divide by" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_rank_that_dies_or_hangs_is_named_and_nothing_is_left(tmp_path, how):
    run = Run(tmp_path, "trainer.total_training_steps=100000", "trainer.stage_timeout_s=10")
    metrics = tmp_path / "metrics.jsonl"
    run.wait_for(lambda: True if metrics.exists() and metrics.read_text().count("\n") >= 2 else None)
    victim = run.wait_for(worker_of(run, "ray::WorkerHost"))
    os.kill(victim.pid, how)
    code, output = run.end()
    assert code == 2, output
    assert "actor_rollout" in output
    assert "rank 0" in output
    assert "Traceback" not in output


def test_an_interrupt_ends_the_run_and_all_it_started(tmp_path):
    run = Run(tmp_path, "trainer.total_training_steps=100000")
    metrics = tmp_path / "metrics.jsonl"
    run.wait_for(lambda: True if metrics.exists() and metrics.read_text().count("\n") >= 2 else None)
    run.process.send_signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130, output
    assert "Traceback" not in output
