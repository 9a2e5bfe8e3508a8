"""Replicas and agent loop workers as Ray actors beside two training ranks, started once since that is slow."""

from __future__ import annotations

import os
import signal
import time

import pytest
import rollout_testing
import torch
from ray import cloudpickle
from rollout_testing import Model, gen_batch_of, ppo_config, prompts_of

from ppo_lib.errors import ModelError, RolloutError, StaleWeightsError, WorkerDiedError
from ppo_lib.models import load_tokenizer, resolve_model_path
from ppo_lib.reward import RewardLoopManager
from ppo_lib.rollout import AgentLoopManager, CheckpointEngineManager, LLMServerManager
from ppo_lib.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from protocol import DataProto

cloudpickle.register_pickle_by_value(rollout_testing)  # worker processes cannot import from the tests' folder
PROMPTS = prompts_of([4, 19, 9, 6])


class Parts:
    """Two ranks, two replicas, one agent loop worker."""

    def __init__(self, path: str, timeout_s: float = 60.0, **rollout: object) -> None:
        settings = {"load_format": "dummy", "response_length": 12, "agent.num_workers": 1, "max_restarts": 1, **rollout}
        self.config = ppo_config(path, "reward.num_workers=0", **settings)
        self.tokenizer = load_tokenizer(resolve_model_path("builtin:tiny-llama"))
        self.pool = RayResourcePool([2], use_gpu=False)
        self.group = RayWorkerGroup(self.pool, RayClassWithInitArgs(cls=Model, path=path), timeout_s=timeout_s)
        section = self.config.actor_rollout_ref
        self.servers = LLMServerManager.create(section, path, self.tokenizer, "hf", "cpu", self.pool, 2, timeout_s)
        self.checkpoints = CheckpointEngineManager(section.rollout.checkpoint_engine, self.group, self.servers)
        self.reward = RewardLoopManager(self.config.reward, self.tokenizer, score)
        self.loops = AgentLoopManager(self.config, self.tokenizer, self.servers, self.reward)

    def close(self) -> None:
        self.loops.shutdown()
        self.reward.close()
        self.servers.shutdown()
        self.group.shutdown()


def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))


@pytest.fixture(scope="module")
def parts(ray_cluster, model_dirs):
    parts = Parts(model_dirs["llama"])
    yield parts
    parts.close()


def _check_log_probs(parts: Parts, output: DataProto) -> None:
    for row in range(0, len(output), 3):
        prompt = output.batch["prompts"][row][-int(output.batch["attention_mask"][row, :64].sum()) :].tolist()
        mask = output.batch["response_mask"][row].bool()
        expected = parts.group.log_probs(prompt, output.batch["responses"][row][mask].tolist())
        torch.testing.assert_close(
            output.batch["rollout_log_probs"][row][mask], torch.tensor(expected), atol=1e-4, rtol=0
        )


def test_generation_follows_the_trainers_weights_on_every_replica(parts):
    with pytest.raises(StaleWeightsError, match="not been sent any weights"):
        parts.loops.generate_sequences(gen_batch_of(PROMPTS, n=2))
    outputs = []
    for version in range(2):
        parts.group.change(version)
        parts.checkpoints.sleep_replicas()
        assert parts.checkpoints.update_weights(version) == version
        output = parts.loops.generate_sequences(gen_batch_of(PROMPTS, n=4))
        assert set(output.batch["weight_version_min"].tolist()) == {version}
        _check_log_probs(parts, output)
        assert output.batch["rm_scores"].sum() > 0
        outputs.append(output)
    assert not torch.equal(outputs[0].batch["responses"], outputs[1].batch["responses"])
    again = parts.loops.generate_sequences(gen_batch_of(PROMPTS, n=4))
    for key, tensor in outputs[1].batch.items():
        assert torch.equal(tensor, again.batch[key]), key


def test_more_requests_than_run_at_a_time_all_come_back(parts):
    output = parts.loops.generate_sequences(gen_batch_of(PROMPTS, n=300, temperature=2.0))
    assert len(output) == 1200
    assert output.batch["response_mask"].any(1).all()


def test_a_bad_update_is_an_error_with_its_own_class_and_the_next_one_heals(parts):
    parts.group.set_fault("missing")
    version = parts.checkpoints.version
    with pytest.raises(RolloutError, match="left out 1 of 21 parameters: model"):
        parts.checkpoints.update_weights(9)
    with pytest.raises(StaleWeightsError, match="its last weight update failed"):
        parts.loops.generate_sequences(gen_batch_of(PROMPTS))
    parts.group.set_fault("unknown")
    with pytest.raises(RolloutError, match=r"model.nrom.weight"):
        parts.checkpoints.update_weights(9)
    parts.group.set_fault(None)
    assert parts.checkpoints.update_weights(9) == version + 1
    assert len(parts.loops.generate_sequences(gen_batch_of(PROMPTS))) == 4


def test_errors_of_agent_loops_arrive_as_they_were_raised(parts):
    gen_batch = gen_batch_of(PROMPTS)
    gen_batch.batch["input_ids"][2, -1] = 5000
    with pytest.raises(RolloutError, match="vocabulary is 0 to 95"):
        parts.loops.generate_sequences(gen_batch)
    _wait_until_idle(parts)


def test_a_failed_batch_is_called_off_on_every_replica_through_the_agent_loop_workers(parts):
    gen_batch = gen_batch_of(PROMPTS, n=200)
    gen_batch.batch["input_ids"][-1, -1] = 5000  # on the second replica, whose cohort never gets complete
    with pytest.raises(RolloutError, match="vocabulary is 0 to 95"):
        parts.loops.generate_sequences(gen_batch)
    _wait_until_idle(parts)
    parts.checkpoints.sleep_replicas()  # refused while requests are held
    parts.checkpoints.wake_replicas()


def _wait_until_idle(parts: Parts) -> None:
    """A cancellation reaches the engines a moment after the error reaches the caller."""
    deadline = time.monotonic() + 10
    while any(status.running or status.waiting for status in parts.servers.status()):
        assert time.monotonic() < deadline, parts.servers.status()
        time.sleep(0.05)


def test_a_model_that_cannot_be_loaded_is_an_error_and_leaves_no_actor(parts, tmp_path, no_leftovers):
    config = ppo_config(tmp_path).actor_rollout_ref
    pool = RayResourcePool([1], use_gpu=False)
    with pytest.raises(ModelError, match="cannot load the model"):
        LLMServerManager.create(config, str(tmp_path), None, "hf", "cpu", pool, 1, 60.0)
    pool.shutdown()


def _kill_while_it_generates(parts: Parts, replica: int) -> tuple[list, int]:
    """Submit a batch and kill the replica's process over it; returns the handles and the process."""
    for _ in range(20):
        handles = parts.loops.submit(gen_batch_of(PROMPTS, n=200))
        while not all(handle.future.done() for handle in handles):
            status = parts.servers.status()[replica]
            if status.running:
                os.kill(status.detail["pid"], signal.SIGKILL)
                return handles, status.detail["pid"]
        list(parts.loops.collect(handles))  # it was through before it was seen at work
    raise AssertionError("20 batches were through before the replica was seen at work")


def test_a_killed_replica_is_restarted_with_the_current_weights_and_its_requests_run_again(parts):
    parts.group.change(7)
    version = parts.checkpoints.update_weights(7)
    handles, _ = _kill_while_it_generates(parts, 1)
    output = parts.loops.collate(list(parts.loops.collect(handles)), gen_batch_of(PROMPTS, n=200))
    assert [handle.restarts for handle in parts.servers.replicas] == [0, 1]
    assert output.batch["weight_version_min"].unique().tolist() == [version]
    _check_log_probs(parts, output)


def test_a_replica_killed_more_often_than_allowed_is_named_within_seconds_and_all_is_cleaned_up(parts, no_leftovers):
    processes = [status.detail["pid"] for status in parts.servers.status()]
    handles, _ = _kill_while_it_generates(parts, 1)  # max_restarts is 1, and used up
    begin = time.monotonic()
    with pytest.raises(WorkerDiedError, match="rollout replica 1 died during generate"):
        list(parts.loops.collect(handles))
    assert time.monotonic() - begin < 40
    with pytest.raises(WorkerDiedError, match=r"has no engine|is starting another"):
        parts.servers.status()
    parts.close()
    assert not no_leftovers.survivors(set(processes))
