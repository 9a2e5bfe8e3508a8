from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from rollout_testing import gen_batch_of, ppo_config, prompts_of, rollout_config
from sglang_testing import Parts, child, signal_while_it_generates

from ppo_lib.errors import ConfigError, RolloutError, WorkerDiedError
from ppo_lib.rollout.sglang.engine import SGLangEngine
from ppo_lib.trainer.preflight import preflight
from protocol import DataProto

PROMPTS = prompts_of([4, 19, 9, 6])


@pytest.fixture
def no_processes_left() -> Iterator[None]:
    """Nothing of an engine is left below this process, nor of its files."""
    yield
    deadline = time.monotonic() + 15
    while (left := _engines_below()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _engines_below() -> set[int]:
    found = set()
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        ours = "sglang::" in line or "ppo_lib.rollout.sglang.host" in line
        if ours and process.info["status"] != psutil.STATUS_ZOMBIE and _is_below(process):
            found.add(process.info["pid"])
    return found - KEPT


def _is_below(process: psutil.Process) -> bool:
    try:
        return os.getpid() in [p.pid for p in process.parents()]
    except psutil.NoSuchProcess:
        return False


KEPT: set[int] = set()


@pytest.fixture(autouse=True)
def _shared_engines_are_kept() -> None:
    KEPT.update(_engines_below())


def _check(parts: Parts, output: DataProto) -> None:
    """Log-probs are those of the group's current weights."""
    for row in range(0, len(output), 3):
        length = int(output.batch["response_mask"][row].sum())
        prompt = output.batch["prompts"][row][output.batch["attention_mask"][row, :64].bool()].tolist()
        response = output.batch["responses"][row, :length].tolist()
        expected = torch.tensor(parts.group.log_probs(prompt, response))
        torch.testing.assert_close(output.batch["rollout_log_probs"][row, :length], expected, atol=5e-5, rtol=0)


def test_an_engine_killed_or_hanging_while_it_generates_is_started_again_and_the_batch_comes_back_whole(
    model_dirs, no_processes_left
):
    # enough tokens that the engine is at work for longer than it takes a busy machine to see it
    settings = {"response_length": 128, "ignore_eos": True, "request_timeout_s": 20, "max_restarts": 2}
    parts = Parts(model_dirs["llama"], **settings)
    batch = gen_batch_of(PROMPTS, n=24)
    try:
        parts.group.change(1)
        parts.checkpoints.update_weights(0)
        for restarts, (whom, what) in enumerate(
            [
                (lambda: child(parts.host(), "scheduler"), signal.SIGKILL),
                (lambda: child(parts.host(), "scheduler"), signal.SIGSTOP),
            ]
        ):
            parts.group.change(2 + restarts)
            version = parts.checkpoints.update_weights(restarts)
            handles = parts.loops.submit(batch)
            signal_while_it_generates(parts.servers, handles, whom, what)
            output = parts.loops.collate(list(parts.loops.collect(handles)), batch)
            assert parts.servers.replicas[0].restarts == restarts + 1
            assert len(output) == len(batch)
            assert output.batch["weight_version_min"].unique().tolist() == [version]
            _check(parts, output)
            parts.checkpoints.sleep_replicas()

        handles = parts.loops.submit(batch) if parts.checkpoints.update_weights(9) else []
        begin = signal_while_it_generates(parts.servers, handles, parts.host, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"the sglang engine died .*SIGKILL"):
            list(parts.loops.collect(handles))
        assert time.monotonic() - begin < 20
    finally:
        parts.close()


def test_an_engine_that_died_asleep_is_started_again_when_weights_come(model_dirs, no_processes_left):
    parts = Parts(model_dirs["llama"], max_restarts=1)
    try:
        parts.checkpoints.sleep_replicas()
        parts.host().kill()
        parts.checkpoints.update_weights(0)
        output = parts.loops.generate_sequences(gen_batch_of(PROMPTS))
        assert output.batch["weight_version_min"].unique().tolist() == [0]
        _check(parts, output)
    finally:
        parts.close()


def test_a_port_in_use_is_named_before_anything_starts(model_dirs, no_processes_left):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = rollout_config(model_dirs["llama"], **{"engine_kwargs.sglang.nccl_port": port})
        with pytest.raises(RolloutError, match=rf"nccl_port={port}: this port is in use"):
            SGLangEngine(config, model_dirs["llama"])


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(model_dirs, no_processes_left):
    config = rollout_config(model_dirs["llama"], **{"engine_kwargs.sglang.attention_backend": "fa3"})
    with pytest.raises(RolloutError, match=r"could not be started(.|\n)*\n  \| "):
        SGLangEngine(config, model_dirs["llama"])


def test_an_unknown_engine_argument_is_told_with_near_names_before_anything_starts(model_dirs):
    for name, message in {
        "mem_fraction_statics": "has no engine argument 'mem_fraction_statics'; did you mean mem_fraction_static",
        "tp_size": "tp_size cannot be set: ppo_lib sets it itself",
    }.items():
        settings = {"name": "sglang", f"engine_kwargs.sglang.{name}": 1}
        config = ppo_config(
            model_dirs["llama"],
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "trainer.n_gpus_per_node=1",
            "data.train_files=builtin:repeat-digit",
            "data.val_files=builtin:repeat-digit",
            **settings,
        )
        with pytest.raises(ConfigError, match=message):
            preflight(config)


def test_a_driver_that_is_killed_leaves_no_process(model_dirs, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys, time
            sys.path.insert(0, {os.path.dirname(sys.modules["rollout_testing"].__file__)!r})
            from rollout_testing import rollout_config
            from ppo_lib.rollout.sglang.engine import SGLangEngine
            engine = SGLangEngine(rollout_config({model_dirs["llama"]!r}), {model_dirs["llama"]!r})
            print("ready", flush=True)
            time.sleep(600)
        """)
    )
    driver = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert driver.stdout.readline() == "ready\n"
    below = psutil.Process(driver.pid).children(recursive=True)
    assert len(below) >= 3
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
