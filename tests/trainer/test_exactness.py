"""The numbers of a step do not depend on where and how it is computed.

One run generates; the others train on the same generations with another worker group, another number of ranks, another
split. Every `actor/*` and `critic/*` metric must agree, over five steps of two mini-batches each.
"""

from __future__ import annotations

import copy

import pytest
from runs import GRPO, PPO, metrics_of, tiny_trainer

from protocol import DataProto

STEPS = 5


class Recording:
    """Stands around an agent loop manager and keeps what it generates."""

    def __init__(self, manager):
        self.manager, self.outputs = manager, []

    def generate_sequences(self, gen_batch: DataProto) -> DataProto:
        output = self.manager.generate_sequences(gen_batch)
        self.outputs.append(copy.deepcopy(output))
        return output


class Replay:
    """Gives recorded generations back, in order; of each the rows from `first` on, as if the others were dropped."""

    def __init__(self, outputs, first=0):
        self.outputs, self.first = iter(outputs), first

    def generate_sequences(self, gen_batch: DataProto) -> DataProto:
        return copy.deepcopy(next(self.outputs)[self.first :])


def varied(data_source, solution_str, ground_truth, extra_info=None):
    """A score that differs by row: with equal ones the gradient is rounding error, and Adam makes full steps of it."""
    return sum(map(ord, solution_str)) % 17 / 17


def train(folder, *overrides, recorded=None, first=0, steps=STEPS):
    trainer = tiny_trainer(folder, f"trainer.total_training_steps={steps}", *overrides, reward_fn=varied)
    try:
        trainer.init_workers()
        real = trainer.async_rollout_manager
        stand_in = Recording(real) if recorded is None else Replay(recorded, first)
        trainer.async_rollout_manager = stand_in
        trainer.fit()
        trainer.async_rollout_manager = real
    finally:
        trainer.close()
    learned = [{k: v for k, v in m.items() if k.startswith(("actor/", "critic/"))} for m in metrics_of(folder)]
    return learned, getattr(stand_in, "outputs", None)


def assert_same(found, expected, steps=STEPS):
    assert len(found) == len(expected) == steps
    for step, (ours, theirs) in enumerate(zip(found, expected), 1):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), f"step {step}: {name}"


LORA = (*GRPO, "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8")


@pytest.mark.parametrize("algorithm", [PPO, GRPO, LORA], ids=["ppo", "grpo", "lora"])
def test_micro_batches_do_not_change_the_numbers(tmp_path, algorithm):
    expected, recorded = train(tmp_path / "packed", *algorithm)
    for size in (1, 3):
        split = (
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}",
            f"critic.ppo_micro_batch_size_per_gpu={size}",
        )
        found, _ = train(tmp_path / f"micro{size}", *algorithm, *split, recorded=recorded)
        assert_same(found, expected)


def test_ray_two_ranks_and_balancing_give_the_numbers_of_one_local_rank(tmp_path, ray_cluster):
    _, recorded = train(tmp_path / "generates", *PPO)
    # one rollout is missing: five rows in the first mini-batch, so that on two ranks a padding row takes part
    expected, _ = train(tmp_path / "local", *PPO, recorded=recorded, first=1)
    ray, two = "trainer.worker_group=ray", "trainer.n_gpus_per_node=2"
    for name, overrides in {
        "ray": (ray,),
        "two": (ray, two),
        "two unbalanced": (ray, two, "trainer.balance_batch=false"),
    }.items():
        found, _ = train(tmp_path / name, *PPO, *overrides, recorded=recorded, first=1)
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (*PPO, "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.shuffle=true"),
        (*LORA, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"),
        (*PPO, "actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "critic.fsdp.fsdp_size=2"),
    ],
    ids=["two epochs", "lora", "replicas of shards"],
)
def test_four_ray_ranks_give_the_numbers_of_one_local_rank(settings, tmp_path, ray_cluster):
    four_rollouts = "actor_rollout_ref.rollout.n=4"  # eight rows a mini-batch
    alone = (*(setting for setting in settings if "fsdp_size" not in setting), four_rollouts)
    _, recorded = train(tmp_path / "generates", *alone)
    expected, _ = train(tmp_path / "local", *alone, recorded=recorded, first=1)
    cores = "ray_kwargs.ray_init.num_cpus=4"  # that the session's Ray was told of, whatever the machine has
    four = ("trainer.worker_group=ray", "trainer.n_gpus_per_node=4", cores, four_rollouts)
    found, _ = train(tmp_path / "four", *settings, *four, recorded=recorded, first=1)
    assert_same(found, expected)
