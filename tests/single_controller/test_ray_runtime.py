"""Starting Ray, and what is left of it when the driver goes, however it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ppo_lib.config import load_config
from ppo_lib.errors import ConfigError
from ppo_lib.single_controller import available_cores, ensure_ray
from ppo_lib.single_controller.ray_runtime import ray_init_options

DRIVER = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a shell has it ignored
from ppo_lib.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
from ppo_lib.single_controller import ensure_ray, register

class Stuck(Worker):
    @register(blocking=False)
    def hang(self):
        threading.Event().wait()

assert ensure_ray({"ray_init": {"num_cpus": 2, "object_store_memory": 100 << 20}})
group = RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Stuck))
future = group.hang()
print("ready", flush=True)
future.get()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_no_rank_outlives_its_driver(no_leftovers, how):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert driver.stdout.readline() == "ready\n", driver.stderr.read()
        # Ray's two agents spend a minute on trying to report the death of a driver that was killed; nothing else may
        processes = {pid for pid, title in no_leftovers.below(driver.pid).items() if "Agent" not in title}
        assert len(processes) >= 3  # Ray's own and the rank
        driver.send_signal(how)
        driver.wait(timeout=30)
        assert no_leftovers.survivors(processes, timeout_s=30) == set()
    finally:
        driver.kill()
        driver.communicate()


def test_ray_that_runs_already_is_left_as_it_is(ray_cluster):
    assert ensure_ray({"ray_init": {"num_cpus": 99}}) is False


def test_what_is_left_null_is_decided_here():
    options = ray_init_options(load_config(overrides=["ray_kwargs.ray_init.num_cpus=3"]).ray_kwargs, has_gpu=False)
    assert options["num_cpus"] == 3
    assert options["object_store_memory"] == 1 << 30
    assert options["include_dashboard"] is False
    assert ray_init_options(None, has_gpu=False)["num_cpus"] == available_cores()
    assert "object_store_memory" not in ray_init_options({}, has_gpu=True)
    with_environment = {"ray_init": {"runtime_env": {"py_executable": None, "env_vars": {"A": "1"}}}}
    assert ray_init_options(with_environment, has_gpu=False)["runtime_env"] == {"env_vars": {"A": "1"}}


def test_a_running_cluster_keeps_its_own_sizes(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = ray_init_options({"ray_init": {"address": "10.0.0.1:6379"}}, has_gpu=False)
    assert options["address"] == "10.0.0.1:6379"
    assert not {"num_cpus", "object_store_memory", "include_dashboard"} & set(options)
    with pytest.raises(ConfigError, match=r"num_cpus cannot be set for the running cluster at 'auto'; remove it"):
        ray_init_options({"ray_init": {"address": "auto", "num_cpus": 4}}, has_gpu=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert ray_init_options(None, has_gpu=False)["address"] == "10.0.0.2:6379"


def test_an_address_where_nothing_answers_is_named():
    code = "from ppo_lib.single_controller import ensure_ray; ensure_ray({'ray_init': {'address': '127.0.0.1:1'}})"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert "ConfigError: ray_kwargs.ray_init.address: no Ray cluster answers at '127.0.0.1:1'" in done.stderr
