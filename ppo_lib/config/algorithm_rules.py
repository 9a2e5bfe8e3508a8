"""What an algorithm needs from the rest of the run: an estimator its fields, a loss its mode, a filter its groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ppo_lib.algorithms.correction_names import importance_bounds, rejections
from ppo_lib.config.needs import estimator_reads, need_sum_pi_squared
from ppo_lib.errors import ConfigError

if TYPE_CHECKING:
    from ppo_lib.config.ppo import PPOConfig

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_FILTER = "algorithm.filter_groups"

SCORE_METRICS = ("reward", "score", "seq_reward", "seq_final_reward")
"""Names of the score itself in `filter_groups.metric`; any other is a column that the scorer reports."""
BYPASS_LOSSES = ("ppo_clip", "reinforce")


def algorithm_problems(config: PPOConfig) -> Iterator[str]:
    """One sentence for each contradiction, with what to set instead."""
    yield from _correction(config)
    yield from _bypass(config)
    yield from _groups(config)
    yield from _components(config)


def _correction(config: PPOConfig) -> Iterator[str]:
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    try:
        importance_bounds(correction.rollout_is_threshold)
        rejections(correction.rollout_rs, correction.rollout_rs_threshold)
    except ConfigError as error:
        yield str(error)
    asked = [f"rollout_is={correction.rollout_is}"] if correction.rollout_is is not None else []
    asked += [f"rollout_rs={correction.rollout_rs}"] if correction.rollout_rs is not None else []
    asked += ["bypass_mode=true"] if correction.bypass_mode else []
    if asked and not rollout.calculate_log_probs:
        yield (
            f"{_CORRECTION}.{asked[0]} compares with the rollout's log-probs, and {_ROLLOUT}.calculate_log_probs is"
            f" false; set {_ROLLOUT}.calculate_log_probs=true"
        )


def _bypass(config: PPOConfig) -> Iterator[str]:
    correction, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    if mode in BYPASS_LOSSES and not correction.bypass_mode:
        yield (
            f"{_ACTOR}.policy_loss.loss_mode={mode} takes its ratio to the rollout's log-probs;"
            f" set {_CORRECTION}.bypass_mode=true, or loss_mode=vanilla"
        )
    if not correction.bypass_mode:
        return
    if need_sum_pi_squared(config):
        wanted = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
        if not estimator_reads(config, "sum_pi_squared"):
            wanted = f"{_ACTOR}.calculate_sum_pi_squared=true"
        yield (
            f"{wanted} needs the pass over the old log-probs, which {_CORRECTION}.bypass_mode leaves out;"
            " set bypass_mode=false"
        )


def _groups(config: PPOConfig) -> Iterator[str]:
    groups, data = config.algorithm.filter_groups, config.data
    if not groups.enable:
        if data.gen_batch_size != data.train_batch_size:
            yield (
                f"data.gen_batch_size={data.gen_batch_size} differs from data.train_batch_size={data.train_batch_size},"
                f" and without {_FILTER}.enable every prompt is trained on; leave gen_batch_size out"
            )
        return
    if config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{_FILTER}.enable=true drops prompts whose rollouts all score the same, which one rollout always does;"
            f" set {_ROLLOUT}.n to 2 or more (8 is usual)"
        )
    most = groups.max_num_gen_batches * data.gen_batch_size
    if 0 < most < data.train_batch_size:
        batches = -(-data.train_batch_size // data.gen_batch_size)
        yield (
            f"{_FILTER}.max_num_gen_batches={groups.max_num_gen_batches} x data.gen_batch_size={data.gen_batch_size}"
            f" prompts cannot fill data.train_batch_size={data.train_batch_size}; set max_num_gen_batches to {batches}"
            " or more, or 0 for no limit"
        )
    if groups.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield (
            f"{_FILTER}.metric=seq_final_reward is the score minus the KL, which is measured after groups are filtered;"
            " set metric=seq_reward, or algorithm.use_kl_in_reward=false"
        )


def _components(config: PPOConfig) -> Iterator[str]:
    algorithm = config.algorithm
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if weights and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights has {len(weights)} values for the {len(keys)} keys of"
            " algorithm.gdpo_reward_keys; give one for each, or none"
        )
