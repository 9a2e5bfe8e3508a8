"""What no single key can know: numbers that must fit together. Each rule stands once, and says what would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ppo_lib.algorithms import names
from ppo_lib.config.algorithm_rules import algorithm_problems
from ppo_lib.config.arithmetic import uses_token_cap, world_size
from ppo_lib.config.needs import need_critic, need_reference_policy

if TYPE_CHECKING:
    from ppo_lib.config.actor import ActorConfig
    from ppo_lib.config.critic import CriticConfig
    from ppo_lib.config.ppo import PPOConfig
    from ppo_lib.config.training import FSDPConfig

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"


def problems_of(config: PPOConfig) -> list[str]:
    """Every contradiction, one sentence each, with values that would work."""
    problems = [
        *_mini_batches(config, _ACTOR, config.actor_rollout_ref.actor),
        *(_mini_batches(config, "critic", config.critic) if need_critic(config) else ()),
        *_token_caps(config),
        *_widths(config),
        *_ranks(config),
        *_sampling(config),
        *_stops(config),
        *_run(config),
        *algorithm_problems(config),
    ]
    return list(dict.fromkeys(problems))  # actor and critic share some


def _mini_batches(config: PPOConfig, name: str, section: ActorConfig | CriticConfig) -> Iterator[str]:
    rollouts, ranks = config.actor_rollout_ref.rollout.n, world_size(config)
    mini = section.ppo_mini_batch_size
    problem = _mini_batch_problem(f"{name}.ppo_mini_batch_size", mini, config.data.train_batch_size, rollouts, ranks)
    if problem is None:
        yield from _micro_batches(name, section, mini * rollouts // ranks)
    elif section is config.actor_rollout_ref.actor or mini != config.actor_rollout_ref.actor.ppo_mini_batch_size:
        yield problem  # a critic that follows the actor is wrong for the same reason


def _mini_batch_problem(key: str, mini: int, prompts: int, rollouts: int, ranks: int) -> str | None:
    fitting = [size for size in _divisors(prompts) if size * rollouts % ranks == 0]
    on_ranks = f"{ranks} ranks (trainer.nnodes x trainer.n_gpus_per_node) cannot share evenly"
    if not fitting:
        choices = _choices("data.train_batch_size", _multiples(ranks // math.gcd(ranks, rollouts), prompts))
        rows = f"{prompts} prompts x {rollouts} rollouts make {prompts * rollouts} rows"
        return f"data.train_batch_size={rows}, which {on_ranks}; {choices}"
    choices = _choices(key, _near(fitting, mini))
    if mini > prompts:
        return f"{key}={mini} prompts is more than data.train_batch_size={prompts}; {choices}"
    if prompts % mini:
        return f"data.train_batch_size={prompts} is not a multiple of {key}={mini}; {choices}"
    if mini * rollouts % ranks:
        return f"{key}={mini} prompts x {rollouts} rollouts make {mini * rollouts} rows, which {on_ranks}; {choices}"
    return None


def _micro_batches(name: str, section: ActorConfig | CriticConfig, rows: int) -> Iterator[str]:
    size = section.ppo_micro_batch_size_per_gpu
    if size is None or section.use_dynamic_bsz or rows % size == 0:
        return
    key = f"{name}.ppo_micro_batch_size_per_gpu"
    yield (
        f"{key}={size} does not divide the {rows} rows of a mini-batch on one rank;"
        f" {_choices(key, _near(_divisors(rows), size))}, or leave it out to pack rows up to the token cap"
    )


def _token_caps(config: PPOConfig) -> Iterator[str]:
    actor, ref, rollout = (getattr(config.actor_rollout_ref, name) for name in ("actor", "ref", "rollout"))
    critic, with_critic = config.critic, need_critic(config)
    log_prob = ("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz")
    passes = [
        (True, actor, f"{_ACTOR}.ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
        (True, rollout, f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", *log_prob),
        (need_reference_policy(config), ref, f"{_REF}.log_prob_max_token_len_per_gpu", *log_prob),
        (with_critic, critic, "critic.ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
        (
            with_critic,
            critic,
            "critic.forward_max_token_len_per_gpu",
            "forward_micro_batch_size_per_gpu",
            "use_dynamic_bsz",
        ),
    ]
    longest = rollout.prompt_length + rollout.response_length
    low: dict[int, list[str]] = {}
    for wanted, section, key, size, dynamic in passes:
        cap = getattr(section, key.rpartition(".")[2])
        if wanted and cap < longest and uses_token_cap(getattr(section, size), getattr(section, dynamic)):
            low.setdefault(cap, []).append(key)
    for cap, (key, *others) in low.items():  # those that follow another share its line
        also = f" (also {', '.join(others)})" if others else ""
        yield (
            f"{key}={cap}{also} is below the longest row, {longest} = {rollout.prompt_length} prompt +"
            f" {rollout.response_length} response tokens; set {key} to {longest} or more"
        )


def _widths(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    for key, value, other, wanted in (
        ("prompt_length", rollout.prompt_length, "data.max_prompt_length", config.data.max_prompt_length),
        ("response_length", rollout.response_length, "data.max_response_length", config.data.max_response_length),
    ):
        if value != wanted:
            yield f"{_ROLLOUT}.{key}={value} differs from {other}={wanted}; set only {other}"
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        key = f"{_ROLLOUT}.max_model_len"
        yield f"{key}={rollout.max_model_len} is below the longest row; set {key} to {longest} or more"


def _ranks(config: PPOConfig) -> Iterator[str]:
    ranks, rollout = world_size(config), config.actor_rollout_ref.rollout
    sections: list[tuple[str, FSDPConfig]] = [
        ("actor_rollout_ref.actor.fsdp_config", config.actor_rollout_ref.actor.fsdp_config)
    ]
    if need_reference_policy(config):
        sections.append(("actor_rollout_ref.ref.fsdp_config", config.actor_rollout_ref.ref.fsdp_config))
    if need_critic(config):
        sections.append(("critic.fsdp", config.critic.fsdp))
    for name, fsdp in sections:
        if fsdp.fsdp_size == 0 or (fsdp.fsdp_size > 0 and ranks % fsdp.fsdp_size):
            key = f"{name}.fsdp_size"
            yield (
                f"{key}={fsdp.fsdp_size} does not divide the {ranks} ranks;"
                f" {_choices(key, [-1, *_near(_divisors(ranks), fsdp.fsdp_size)])}"
            )
    per_node, parallel = config.trainer.n_gpus_per_node, rollout.tensor_model_parallel_size
    if rollout.name == "sglang" and per_node % parallel:
        key = f"{_ROLLOUT}.tensor_model_parallel_size"
        yield (
            f"{key}={parallel} does not divide trainer.n_gpus_per_node={per_node};"
            f" {_choices(key, _near(_divisors(per_node), parallel))}"
        )
    if config.trainer.worker_group == "local" and ranks > 1:
        yield (
            f"trainer.worker_group=local runs one rank in this process, and trainer.nnodes x trainer.n_gpus_per_node"
            f" is {ranks}; set both to 1, or worker_group=ray"
        )


def _sampling(config: PPOConfig) -> Iterator[str]:
    validation = config.actor_rollout_ref.rollout.val_kwargs
    if validation.do_sample and validation.temperature == 0:
        yield (
            f"{_ROLLOUT}.val_kwargs.do_sample=true needs a temperature above 0;"
            f" set {_ROLLOUT}.val_kwargs.temperature=1.0, or do_sample=false for greedy validation"
        )
    for name, top_k in (
        (_ROLLOUT, config.actor_rollout_ref.rollout.top_k),
        (f"{_ROLLOUT}.val_kwargs", validation.top_k),
    ):
        if top_k == 0:
            yield f"{name}.top_k=0 leaves no token to sample; set {name}.top_k to -1 for all, or to 1 or more"


def _stops(config: PPOConfig) -> Iterator[str]:
    if "" in config.actor_rollout_ref.rollout.stop:
        yield f"{_ROLLOUT}.stop holds an empty string, which would end every response before it begins; leave it out"


def _run(config: PPOConfig) -> Iterator[str]:
    trainer, estimator = config.trainer, config.algorithm.adv_estimator
    if config.critic.enable is False and names.find_adv_estimator(estimator).needs_critic:
        yield f"critic.enable=false, but algorithm.adv_estimator={estimator} needs a critic; leave critic.enable null"
    if trainer.critic_warmup and not need_critic(config):
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup}, but algorithm.adv_estimator={estimator} trains no critic,"
            " so nothing would be trained in those steps; set it to 0"
        )
    control, rows = config.algorithm.kl_ctrl, config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if config.algorithm.use_kl_in_reward and control.type == "adaptive" and 5 * control.horizon <= rows:
        yield (
            f"algorithm.kl_ctrl.horizon={control.horizon:g} is a fifth of the {rows} sequences of a step or less, which"
            f" would turn the KL coefficient negative; set it to {rows} or more"
        )
    trained = {_ACTOR: config.actor_rollout_ref.actor} | ({"critic": config.critic} if need_critic(config) else {})
    for key, section in trained.items():
        contents = section.checkpoint.load_contents
        if trainer.resume_mode != "disable" and not {"model", "hf_model"} & set(contents):
            yield (
                f"{key}.checkpoint.load_contents={list(contents)} leaves the model out: a resumed run would go on"
                " from the base weights; add model (to save_contents too), or set trainer.resume_mode=disable"
            )
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder"
    if config.reward.reward_manager.source == "importlib" and not config.reward.reward_manager.module.path:
        yield "reward.reward_manager.source=importlib needs reward.reward_manager.module.path, a Python file"
    for name in ("train_max_samples", "val_max_samples"):
        if getattr(config.data, name) == 0:
            yield f"data.{name}=0 leaves no rows; set data.{name} to -1 for all, or to 1 or more"
    if bool(config.data.custom_cls.path) != bool(config.data.custom_cls.name):
        yield "data.custom_cls needs both path (a Python file) and name (a class in it)"
    if bool(config.data.sampler.class_path) != bool(config.data.sampler.class_name):
        yield "data.sampler needs both class_path (a Python file) and class_name (a class in it)"


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, min(math.isqrt(number), 10**6) + 1) if number % size == 0]  # enough to propose
    return sorted({*small, *(number // size for size in small)})


def _near(fitting: list[int], wanted: int) -> list[int]:
    """The three fitting values nearest to the one that was asked for."""
    return sorted(sorted(fitting, key=lambda size: abs(size - wanted))[:3])


def _multiples(step: int, wanted: int) -> list[int]:
    below = wanted // step * step
    return [number for number in (below, below + step) if number > 0]


def _choices(key: str, values: list[int]) -> str:
    return f"set {key} to {' or '.join(map(str, values))}"
