"""Keys that are right in themselves and change nothing beside the others: one line for each that was typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ppo_lib.algorithms import names
from ppo_lib.config.arithmetic import uses_token_cap
from ppo_lib.config.needs import (
    estimator_reads,
    need_critic,
    need_reference_policy,
    policy_loss_mode,
    uses_lora,
    weighs_in_update,
)
from ppo_lib.config.references import fields_of
from ppo_lib.config.tree import Path, copy, dotted

if TYPE_CHECKING:
    from ppo_lib.config.actor import ActorConfig
    from ppo_lib.config.critic import CriticConfig
    from ppo_lib.config.model import NetworkConfig
    from ppo_lib.config.ppo import PPOConfig

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"

SGLANG_KEYS = tuple(
    f"{_ROLLOUT}.{name}"
    for name in (
        "tensor_model_parallel_size",
        "gpu_memory_utilization",
        "enforce_eager",
        "enable_prefix_caching",
        "engine_kwargs.sglang",
    )
)
"""Keys that only the sglang engine reads."""
_GPU_KEYS = (f"{_ROLLOUT}.gpu_memory_utilization", f"{_ROLLOUT}.enforce_eager")
"""Of those, what it reads on a GPU."""

Row = tuple[str, bool, str]
"""A key (or, with a dot at its end, a section), whether it is without effect here, and why."""


def notices_on(config: PPOConfig, typed: Mapping[Path, Any]) -> list[str]:
    """One line for each typed key that has no effect beside the others, and for each choice that teaches nothing.

    `typed` gives each key the value it would have had anyway: a key that was typed with that value asks for nothing.
    """
    notices = []
    changed = {dotted(path) for path, otherwise in typed.items() if copy(_value(config, path)) != copy(otherwise)}
    for name, applies, why in _rows(config):
        keys = [key for key in sorted(changed) if key == name or (name.endswith(".") and key.startswith(name))]
        if keys and applies:
            changed -= set(keys)
            notices.append(f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {why}")
    estimator = names.find_adv_estimator(config.algorithm.adv_estimator)
    if estimator.compares_rollouts and config.actor_rollout_ref.rollout.n == 1:
        notices.append(
            f"{_ROLLOUT}.n=1: {estimator.name} compares the rollouts of one prompt; set it to 2 or more (8 is usual)"
        )
    if estimator_reads(config, "reward_components") and not config.algorithm.gdpo_reward_keys:
        notices.append(
            f"algorithm.gdpo_reward_keys is empty: {estimator.name} takes the score as the only reward; list the "
            "columns of the scorer's dict that it should normalise one by one, such as [accuracy,format]"
        )
    notices += [
        f"{_ROLLOUT}.stop holds {text}, a backslash and a letter; a line break is written in double quotes, as"
        ' ["\\n"] in a file and \'stop=["\\n"]\' in a shell'
        for text in config.actor_rollout_ref.rollout.stop
        if "\\n" in text or "\\t" in text
    ]
    return notices


def engine_notices(config: PPOConfig, engine: str, device: str) -> list[str]:
    """One line if the engine that `rollout.name` came to does not read, on this device, what is set for it."""
    name = config.actor_rollout_ref.rollout.name
    if engine == "sglang":
        watched, why = (_GPU_KEYS if device == "cpu" else ()), "sglang runs on the CPU here"
    else:
        watched, why = (SGLANG_KEYS if name == "auto" else ()), f"rollout.name is auto, which is {engine} here"
    fields = {dotted(path): (path, field) for path, field in fields_of(type(config)).items()}
    keys = [key for key in watched if _value(config, fields[key][0]) != fields[key][1].get_default()]
    return [f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {why}"] if keys else []


def _value(config: PPOConfig, path: Path) -> Any:
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value


def _rows(config: PPOConfig) -> Iterator[Row]:
    yield "critic.", not need_critic(config), "this advantage estimator needs no critic"
    yield f"{_REF}.", not need_reference_policy(config), "without a KL no reference is kept"
    adapted = uses_lora(config.actor_rollout_ref.model)
    yield f"{_REF}.fsdp_config.", adapted, "with LoRA the reference is the policy without its adapter"
    yield from _lora_rows("actor_rollout_ref.model", config.actor_rollout_ref.model)
    yield from _lora_rows("critic.model", config.critic.model)
    yield from _rollout_rows(config)
    yield from _algorithm_rows(config)
    yield from _update_rows(_ACTOR, config.actor_rollout_ref.actor)
    yield from _update_rows("critic", config.critic)
    yield from _forward_rows(config)
    yield from _run_rows(config)


def _lora_rows(name: str, model: NetworkConfig) -> Iterator[Row]:
    for key in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
        yield f"{name}.{key}", model.lora_adapter_path is not None, "the adapter at lora_adapter_path has its own"
        yield f"{name}.{key}", not uses_lora(model), "LoRA is off: lora_rank is 0"


def _rollout_rows(config: PPOConfig) -> Iterator[Row]:
    rollout = config.actor_rollout_ref.rollout
    for key in SGLANG_KEYS:
        yield key, rollout.name == "hf", "only the sglang engine reads it"
    for name in ("top_k", "top_p"):
        yield f"{_ROLLOUT}.{name}", not rollout.do_sample, "rollout.do_sample is false"
        yield f"{_ROLLOUT}.val_kwargs.{name}", not rollout.val_kwargs.do_sample, "val_kwargs.do_sample is false"
    yield f"{_ROLLOUT}.val_kwargs.temperature", not rollout.val_kwargs.do_sample, "val_kwargs.do_sample is false"
    yield (
        f"{_ROLLOUT}.val_kwargs.n",
        not rollout.val_kwargs.do_sample,
        "val_kwargs.do_sample is false, so all responses to one prompt are the same",
    )


def _algorithm_rows(config: PPOConfig) -> Iterator[Row]:
    algorithm = config.algorithm
    yield "algorithm.kl_penalty", not algorithm.use_kl_in_reward, "use_kl_in_reward is false"
    yield "algorithm.kl_ctrl.", not algorithm.use_kl_in_reward, "use_kl_in_reward is false"
    for name in ("horizon", "target_kl"):
        yield f"algorithm.kl_ctrl.{name}", algorithm.kl_ctrl.type == "fixed", "kl_ctrl.type is fixed"
    estimator = names.find_adv_estimator(algorithm.adv_estimator)
    for name in ("gamma", "lam", "norm_adv_by_std_in_grpo"):
        unread = estimator.settings is not None and name not in estimator.settings
        yield f"algorithm.{name}", unread, f"adv_estimator {estimator.name} does not read it"
    yield from _correction_rows(config)
    yield "algorithm.filter_groups.", not algorithm.filter_groups.enable, "filter_groups.enable is false"
    for name in ("gdpo_reward_keys", "gdpo_reward_weights"):
        yield f"algorithm.{name}", not estimator_reads(config, "reward_components"), "only gdpo reads it"
    actor = config.actor_rollout_ref.actor
    both_set = actor.clip_ratio not in (actor.clip_ratio_low, actor.clip_ratio_high)
    yield f"{_ACTOR}.clip_ratio", both_set, "clip_ratio_low and clip_ratio_high are set"
    for name in ("kl_loss_coef", "kl_loss_type"):
        yield f"{_ACTOR}.{name}", not actor.use_kl_loss, "use_kl_loss is false"
    yield from _policy_loss_rows(config)


def _policy_loss_rows(config: PPOConfig) -> Iterator[Row]:
    """Settings of policy losses that the chosen one does not read."""
    mode = policy_loss_mode(config.actor_rollout_ref.actor, config.algorithm.rollout_correction)
    loss = names.find_policy_loss(mode)
    for name in sorted(names.POLICY_LOSS_SETTINGS):
        unread = loss.settings is not None and name not in loss.settings
        yield f"{_ACTOR}.{name}", unread, f"the policy loss {loss.name} does not read it"


def _correction_rows(config: PPOConfig) -> Iterator[Row]:
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    weighted = correction.rollout_is is not None
    loss = policy_loss_mode(config.actor_rollout_ref.actor, correction)
    if correction.bypass_mode:
        weighted = weighs_in_update(loss, correction)
        yield f"{key}.rollout_is", not weighted, f"in bypass mode reinforce weighs, and the policy loss is {loss}"
    for name in ("rollout_is_threshold", "rollout_is_batch_normalize"):
        yield f"{key}.{name}", not weighted, "no importance weights are taken"
    yield f"{key}.rollout_rs_threshold", correction.rollout_rs is None, "rollout_rs is null"
    yield f"{key}.loss_type", not correction.bypass_mode, "bypass_mode is false"
    yield f"{key}.loss_type", loss != correction.loss_type, f"policy_loss.loss_mode is {loss}"


def _update_rows(name: str, section: ActorConfig | CriticConfig) -> Iterator[Row]:
    size, dynamic = section.ppo_micro_batch_size_per_gpu, section.use_dynamic_bsz
    yield f"{name}.ppo_micro_batch_size_per_gpu", dynamic, "use_dynamic_bsz packs rows up to the token cap"
    yield f"{name}.ppo_max_token_len_per_gpu", not uses_token_cap(size, dynamic), "a micro-batch size is set"
    yield f"{name}.data_loader_seed", not section.shuffle, "shuffle is false"
    yield (
        f"{name}.loss_scale_factor",
        section.loss_agg_mode != "seq-mean-token-sum-norm",
        "only seq-mean-token-sum-norm divides by it",
    )
    optim = section.optim
    yield f"{name}.grad_clip", optim.clip_grad != section.grad_clip, f"{name}.optim.clip_grad is set"
    yield f"{name}.optim.num_cycles", optim.lr_scheduler_type != "cosine", "the schedule is not a cosine"
    yield f"{name}.optim.min_lr_ratio", optim.lr_scheduler_type == "constant", "the schedule is constant"
    yield f"{name}.optim.lr_warmup_steps_ratio", optim.lr_warmup_steps >= 0, "lr_warmup_steps is set"


def _forward_rows(config: PPOConfig) -> Iterator[Row]:
    """Micro-batch sizes and caps of the forward-only passes."""
    for name, section in ((_REF, config.actor_rollout_ref.ref), (_ROLLOUT, config.actor_rollout_ref.rollout)):
        size, dynamic = section.log_prob_micro_batch_size_per_gpu, section.log_prob_use_dynamic_bsz
        yield f"{name}.log_prob_micro_batch_size_per_gpu", dynamic, "rows are packed up to the token cap"
        yield f"{name}.log_prob_max_token_len_per_gpu", not uses_token_cap(size, dynamic), "a micro-batch size is set"
    critic = config.critic
    size, dynamic = critic.forward_micro_batch_size_per_gpu, critic.use_dynamic_bsz
    yield "critic.forward_micro_batch_size_per_gpu", dynamic, "rows are packed up to the token cap"
    yield "critic.forward_max_token_len_per_gpu", not uses_token_cap(size, dynamic), "a micro-batch size is set"


def _run_rows(config: PPOConfig) -> Iterator[Row]:
    data, trainer, reward = config.data, config.trainer, config.reward
    own_order = data.sampler.class_path is not None and data.train_max_samples < 0
    yield "data.shuffle", own_order, "data.sampler gives the order"
    yield "data.seed", own_order and not data.validation_shuffle, "data.sampler gives the order"
    yield "data.seed", not data.shuffle and not data.validation_shuffle, "nothing is shuffled"
    yield "data.filter_overlong_prompts_workers", not data.filter_overlong_prompts, "filter_overlong_prompts is false"
    yield "trainer.resume_from_path", trainer.resume_mode != "resume_path", "resume_mode is not resume_path"
    for name in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        yield f"trainer.{name}", trainer.save_freq <= 0, "nothing is saved"
    yield "ray_kwargs.", trainer.worker_group == "local", "trainer.worker_group is local"
    yield "reward.custom_reward_function.", reward.custom_reward_function.path is None, "its path is not set"
    yield (
        "reward.reward_manager.module.",
        reward.reward_manager.source == "register",
        "reward.reward_manager.source is register",
    )
