from __future__ import annotations

import pytest
import torch
from rollout_testing import Model, prompts_of, requests_of, rollout_config, run

from ppo_lib.errors import ConfigError, EngineAsleepError, RolloutError, StaleWeightsError
from ppo_lib.rollout import CheckpointEngineManager, LLMServerManager, engines, resolve_engine_name
from ppo_lib.rollout.sglang import versions
from ppo_lib.single_controller import LocalWorkerGroup, RayClassWithInitArgs


@pytest.fixture
def parts(model_dirs):
    """A training group, a replica without weights, and the manager between them, all in this process."""
    path = model_dirs["qwen2-sliding"]  # tied embeddings
    config = rollout_config(path, load_format="dummy", **{"checkpoint_engine.update_weights_bucket_megabytes": 1})
    group = LocalWorkerGroup(None, RayClassWithInitArgs(cls=Model, path=path))
    servers = LLMServerManager.create(config, path, None, "auto", "cpu", None, num_replicas=1, timeout_s=30)
    manager = CheckpointEngineManager(config.rollout.checkpoint_engine, group, servers)
    yield group, servers, manager
    servers.shutdown()
    group.shutdown()


def _output(servers):
    (request,) = requests_of(prompts_of([7]), max_tokens=10, ignore_eos=True)
    return request.prompt_ids, run(servers.generate(request))


def test_the_next_output_comes_from_the_new_weights_and_carries_their_version(parts):
    group, servers, manager = parts
    seen = []
    for step in range(3):
        group.change(step)
        assert manager.update_weights(global_steps=10 + step) == step
        prompt, output = _output(servers)
        expected = torch.tensor(group.log_probs(prompt, output.token_ids))
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-4, rtol=0)
        assert (output.weight_version_min, output.weight_version_max) == (step, step)
        assert (manager.version, manager.global_steps) == (step, 10 + step)
        seen.append(output.token_ids)
    assert len({tuple(tokens) for tokens in seen}) == 3


def test_the_replica_shares_no_memory_with_the_trainer(parts):
    group, servers, manager = parts
    manager.update_weights(0)
    before = _output(servers)
    group.change(5)
    assert _output(servers) == before


def test_a_replica_that_missed_the_update_refuses(parts):
    _, servers, manager = parts
    with pytest.raises(StaleWeightsError, match="not been sent any weights"):
        _output(servers)
    manager.update_weights(0)
    servers.weight_version = 1  # as after an update that went to the others only
    with pytest.raises(StaleWeightsError, match="holds weight version 0; request r0 asks for 1 or newer"):
        _output(servers)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("unknown", "model.nrom.weight that the engine.*near names: model.norm.weight"),
        ("missing", "left out 1 of 26 parameters: model.norm.weight"),
        ("shape", r"model.norm.weight with shape \(63,\)"),
    ],
)
def test_a_bad_update_is_named_and_nothing_is_served_until_a_good_one(parts, fault, message):
    group, servers, manager = parts
    manager.update_weights(0)
    before = _output(servers)
    group.set_fault(fault)
    with pytest.raises(RolloutError, match=message):
        manager.update_weights(1)
    assert manager.version == 0
    assert servers.status()[0].state == "broken"
    with pytest.raises(StaleWeightsError, match="its last weight update failed"):
        _output(servers)
    group.set_fault(None)
    assert manager.update_weights(1) == 1
    assert _output(servers)[1].token_ids == before[1].token_ids


def test_an_update_that_breaks_off_on_the_trainers_side_leaves_the_replica_refusing(parts):
    group, servers, manager = parts
    manager.update_weights(0)
    group.set_fault("raise")
    with pytest.raises(RuntimeError, match="the gather broke"):
        manager.update_weights(1)
    assert servers.status()[0].state == "updating"
    group.set_fault(None)
    manager.update_weights(1)
    assert _output(servers)[1].weight_version_max == 1


def test_sleeping_and_waking_may_be_repeated_and_an_update_wakes(parts):
    _, servers, manager = parts
    manager.sleep_replicas()
    manager.sleep_replicas()
    assert servers.status()[0].state == "asleep"
    manager.update_weights(0)
    output = _output(servers)
    manager.sleep_replicas()
    with pytest.raises(EngineAsleepError):
        _output(servers)
    manager.wake_replicas()
    manager.wake_replicas()
    assert _output(servers) == output


def test_weights_without_an_open_update_or_for_a_sleeping_engine_are_refused(parts):
    _, servers, manager = parts
    with pytest.raises(RolloutError, match="without a begin_update"):
        servers.broadcast("finish_update", 0)
    manager.sleep_replicas()
    with pytest.raises(EngineAsleepError, match="wake the tag weights first"):
        servers.broadcast("begin_update")


def test_unknown_names_are_answered_with_the_near_ones(parts, model_dirs):
    group, servers, _ = parts
    config = rollout_config(model_dirs["llama"], **{"checkpoint_engine.backend": "naiv"})
    with pytest.raises(ConfigError, match="unknown checkpoint engine 'naiv': did you mean 'naive'"):
        CheckpointEngineManager(config.rollout.checkpoint_engine, group, servers)
    with pytest.raises(ConfigError, match="unknown rollout engine 'hff': did you mean 'hf'"):
        resolve_engine_name("hff")


def test_auto_is_sglang_where_it_and_a_gpu_are_there_and_its_absence_is_told_with_the_command(monkeypatch):
    for installed, on_cpu, on_gpu in ((True, "hf", "sglang"), (False, "hf", "hf")):
        monkeypatch.setattr(engines, "is_installed", lambda installed=installed: installed)
        assert (resolve_engine_name("auto", "cpu"), resolve_engine_name("auto", "cuda")) == (on_cpu, on_gpu)
    monkeypatch.setattr(versions, "is_installed", lambda: False)
    with pytest.raises(RolloutError, match=r"pip install 'ppo_lib\[sglang\]'; on a CPU with: make setup-sglang-cpu"):
        resolve_engine_name("sglang")
