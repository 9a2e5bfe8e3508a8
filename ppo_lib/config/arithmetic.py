"""The numbers that follow from a configuration. They have names of their own; no configured value is rewritten."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppo_lib.config.needs import need_critic, need_old_log_probs, need_reference_policy

if TYPE_CHECKING:
    from ppo_lib.config.actor import ActorConfig
    from ppo_lib.config.critic import CriticConfig
    from ppo_lib.config.ppo import PPOConfig


@dataclass(frozen=True)
class UpdateArithmetic:
    """How the rows of one step are spent on one model's updates."""

    prompts_per_mini_batch: int
    rows_per_mini_batch: int
    rows_per_rank_per_mini_batch: int
    mini_batches_per_step: int
    ppo_epochs: int
    optimizer_steps_per_rollout: int
    micro_batching: str


@dataclass(frozen=True)
class StepArithmetic:
    """The numbers of one training step. `actor` always, `critic` where one is trained."""

    world_size: int
    prompts_per_step: int
    rollouts_per_prompt: int
    rows_per_step: int
    rows_per_rank: int
    prompt_tokens: int
    response_tokens: int
    row_tokens: int
    ranks_per_replica: int
    replicas: int
    actor: UpdateArithmetic
    critic: UpdateArithmetic | None
    old_log_probs: str
    reference: str

    @property
    def mini_batches_per_step(self) -> int:
        """Of the actor."""
        return self.actor.mini_batches_per_step

    @property
    def prompts_per_mini_batch(self) -> int:
        """Of the actor."""
        return self.actor.prompts_per_mini_batch

    @property
    def rows_per_mini_batch(self) -> int:
        """Of the actor."""
        return self.actor.rows_per_mini_batch

    @property
    def rows_per_rank_per_mini_batch(self) -> int:
        """Of the actor."""
        return self.actor.rows_per_rank_per_mini_batch

    @property
    def optimizer_steps_per_rollout(self) -> int:
        """Of the actor: mini-batches times epochs."""
        return self.actor.optimizer_steps_per_rollout

    def table(self) -> str:
        """The text that `ppo_lib check` prints."""
        rows = [
            ("ranks", f"{self.world_size}"),
            ("prompts a step", f"{self.prompts_per_step}"),
            ("rollouts a prompt", f"{self.rollouts_per_prompt}"),
            ("rows a step", f"{self.rows_per_step} = {self.prompts_per_step} x {self.rollouts_per_prompt}"),
            ("rows a rank", f"{self.rows_per_rank}"),
            (
                "tokens a row",
                f"at most {self.row_tokens} = {self.prompt_tokens} prompt + {self.response_tokens} response",
            ),
            ("rollout replicas", f"{self.replicas}, each on {_count(self.ranks_per_replica, 'rank')}"),
            ("old log-probs", self.old_log_probs),
            ("reference", self.reference),
        ]
        for name, update in (("actor", self.actor), ("critic", self.critic)):
            rows += _update_rows(name, update) if update else [(name, "none")]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label.ljust(width)}  {text}" for label, text in rows)


def _update_rows(name: str, update: UpdateArithmetic) -> list[tuple[str, str]]:
    return [
        (
            f"{name} mini-batch",
            f"{update.prompts_per_mini_batch} prompts = {update.rows_per_mini_batch} rows,"
            f" {update.rows_per_rank_per_mini_batch} a rank",
        ),
        (f"{name} micro-batch", update.micro_batching),
        (
            f"{name} optimizer steps",
            f"{update.optimizer_steps_per_rollout} a step ="
            f" {_count(update.mini_batches_per_step, 'mini-batch', 'mini-batches')}"
            f" x {_count(update.ppo_epochs, 'epoch')}",
        ),
    ]


def world_size(config: PPOConfig) -> int:
    """Ranks of the run."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def step_arithmetic(config: PPOConfig, engine: str | None = None) -> StepArithmetic:
    """The numbers of one step of a validated configuration; `engine` is what `rollout.name: auto` came to."""
    ranks, rollout = world_size(config), config.actor_rollout_ref.rollout
    prompts = config.data.train_batch_size
    per_replica = rollout.tensor_model_parallel_size if (engine or rollout.name) == "sglang" else 1
    reference = "kept, frozen" if need_reference_policy(config) else "none"
    return StepArithmetic(
        world_size=ranks,
        prompts_per_step=prompts,
        rollouts_per_prompt=rollout.n,
        rows_per_step=prompts * rollout.n,
        rows_per_rank=math.ceil(prompts * rollout.n / ranks),
        prompt_tokens=rollout.prompt_length,
        response_tokens=rollout.response_length,
        row_tokens=rollout.prompt_length + rollout.response_length,
        ranks_per_replica=per_replica,
        replicas=ranks // per_replica,
        actor=_update(config, config.actor_rollout_ref.actor),
        critic=_update(config, config.critic) if need_critic(config) else None,
        old_log_probs=_old_log_probs(config, engine),
        reference=reference,
    )


def _old_log_probs(config: PPOConfig, engine: str | None) -> str:
    if config.algorithm.rollout_correction.bypass_mode:
        return "those of the rollout"
    return "computed before the update" if need_old_log_probs(config, engine) else "those of the update itself"


def _update(config: PPOConfig, model: ActorConfig | CriticConfig) -> UpdateArithmetic:
    rows = model.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    per_rank = math.ceil(rows / world_size(config))
    mini_batches = math.ceil(config.data.train_batch_size / model.ppo_mini_batch_size)
    return UpdateArithmetic(
        prompts_per_mini_batch=model.ppo_mini_batch_size,
        rows_per_mini_batch=rows,
        rows_per_rank_per_mini_batch=per_rank,
        mini_batches_per_step=mini_batches,
        ppo_epochs=model.ppo_epochs,
        optimizer_steps_per_rollout=mini_batches * model.ppo_epochs,
        micro_batching=_micro_batching(
            per_rank, model.ppo_micro_batch_size_per_gpu, model.use_dynamic_bsz, model.ppo_max_token_len_per_gpu
        ),
    )


def uses_token_cap(micro_batch_size: int | None, use_dynamic_bsz: bool) -> bool:
    """Whether rows are packed up to a token cap: when asked to, or when no micro-batch size is set."""
    return use_dynamic_bsz or micro_batch_size is None


def _micro_batching(rows: int, size: int | None, dynamic: bool, cap: int) -> str:
    if uses_token_cap(size, dynamic):
        return f"rows packed up to {cap} tokens"
    assert size is not None
    return f"{_count(size, 'row')} a rank, {_count(math.ceil(rows / size), 'micro-batch', 'micro-batches')}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
