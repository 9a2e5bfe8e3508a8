"""The defaults behind the trainer's optional arguments: which class plays which role, where, over which data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppo_lib.config import PPOConfig, need_critic, need_reference_policy
from ppo_lib.data import ResumableDataLoader, create_rl_dataset, create_sampler
from ppo_lib.data import collate_fn as default_collate_fn
from ppo_lib.errors import ConfigError
from ppo_lib.single_controller import (
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    Role,
    create_colocated_worker_cls,
)
from ppo_lib.workers import ActorRolloutRefWorker, CriticWorker

GLOBAL_POOL = "global_pool"
WORKER_ROLES = (Role.ActorRolloutRef, Role.ActorRollout, Role.RefPolicy, Role.Critic)


def check_context(config: PPOConfig, model_path: str) -> None:
    """Raise `ConfigError` if prompt and response together are longer than the model's positions reach."""
    from transformers import AutoConfig

    model, data = config.actor_rollout_ref.model, config.data
    found = AutoConfig.from_pretrained(model_path, trust_remote_code=model.trust_remote_code)
    context = model.override_config.get("max_position_embeddings", getattr(found, "max_position_embeddings", None))
    width = data.max_prompt_length + data.max_response_length
    if context is not None and width > context:
        raise ConfigError(
            f"data.max_prompt_length={data.max_prompt_length} + data.max_response_length={data.max_response_length} = "
            f"{width} tokens, but {model.path} has {context} positions; lower one of them by {width - context}"
        )


def default_role_worker_mapping(config: PPOConfig) -> dict[Role, type]:
    """The roles this run needs. The reference shares the actor's worker unless a caller maps `Role.RefPolicy`."""
    actor = Role.ActorRolloutRef if need_reference_policy(config) else Role.ActorRollout
    mapping: dict[Role, type] = {actor: ActorRolloutRefWorker}
    if need_critic(config):
        mapping[Role.Critic] = CriticWorker
    return mapping


def default_resource_pool_manager(config: PPOConfig, roles: dict[Role, type], device_name: str) -> ResourcePoolManager:
    """One pool of all slots, every role colocated in it."""
    spec = {GLOBAL_POOL: [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
    return ResourcePoolManager(spec, mapping=dict.fromkeys(roles, GLOBAL_POOL), device_name=device_name)


def default_worker_group_cls(config: PPOConfig) -> type:
    """`trainer.worker_group`: Ray actors, or everything in this process."""
    return LocalWorkerGroup if config.trainer.worker_group == "local" else RayWorkerGroup


def create_worker_groups(
    config: PPOConfig,
    roles: dict[Role, type],
    pools: ResourcePoolManager,
    group_cls: type,
    device_name: str,
    optimizer_steps: dict[Role, int],
) -> dict[Role, Any]:
    """One group per role; the roles of a pool share its processes."""
    groups: dict[Role, Any] = {}
    for name in pools.resource_pool_spec:
        here = {role: cls for role, cls in roles.items() if role in WORKER_ROLES and pools.mapping[role] == name}
        if not here:
            continue
        correction = {"rollout_correction": config.algorithm.rollout_correction}
        classes = {
            str(role): RayClassWithInitArgs(
                cls=cls,
                config=config.critic if role is Role.Critic else config.actor_rollout_ref,
                role=str(role),
                device_name=device_name,
                total_optimizer_steps=optimizer_steps.get(role, 0),
                **({} if role is Role.Critic else correction),
            )
            for role, cls in here.items()
        }
        shared = group_cls(
            resource_pool=None if issubclass(group_cls, LocalWorkerGroup) else pools.create_resource_pool()[name],
            ray_cls_with_init=create_colocated_worker_cls(classes),
            device_name=device_name,
            timeout_s=config.trainer.stage_timeout_s,
        )
        spawned = shared.spawn(prefix_set=classes.keys())
        groups |= {role: spawned[str(role)] for role in here}
    return groups


def create_dataloaders(
    config: PPOConfig,
    tokenizer: Any,
    processor: Any,
    train_dataset: Any,
    val_dataset: Any,
    collate_fn: Callable[[list[dict[str, Any]]], dict[str, Any]] | None,
    train_sampler: Any,
) -> tuple[ResumableDataLoader, ResumableDataLoader]:
    """The training loader (whole batches only) and the validation loader (all rows, in order by default)."""
    data = config.data
    if train_dataset is None:
        train_dataset = create_rl_dataset(
            data.train_files, data, tokenizer, processor, is_train=True, max_samples=data.train_max_samples
        )
    if val_dataset is None:
        val_dataset = create_rl_dataset(
            data.val_files, data, tokenizer, processor, is_train=False, max_samples=data.val_max_samples
        )
    shared = {"collate_fn": collate_fn or default_collate_fn, "num_workers": data.dataloader_num_workers}
    train = ResumableDataLoader(
        train_dataset,
        data.gen_batch_size,
        shuffle=data.shuffle,
        seed=data.seed,
        drop_last=True,
        sampler=train_sampler or create_sampler(data, train_dataset),
        **shared,
    )
    val = ResumableDataLoader(
        val_dataset,
        data.val_batch_size or len(val_dataset),
        shuffle=data.validation_shuffle,
        seed=data.seed,
        drop_last=False,
        **shared,
    )
    return train, val
