"""The spine: `RayPPOTrainer.init_workers()` builds everything, `fit()` runs it.

What this file deliberately does not do: compute. A stage's work stands in `stages.py`; the pieces a caller may replace
are built in `build.py`; here they are put in order, so that one can read a step of PPO from top to bottom.

    dataloader -> gen -> balance -> reward -> old_log_prob -> ref -> values -> adv -> update_critic -> update_actor
               -> save_checkpoint -> update_weights -> testing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ppo_lib.algorithms.kl import get_kl_controller
from ppo_lib.config import PPOConfig, as_config, need_old_log_probs, step_arithmetic
from ppo_lib.errors import ConfigError, DataError, PPOLibError
from ppo_lib.models import load_processor, load_tokenizer, resolve_model_path
from ppo_lib.reward import RewardLoopManager, as_batch_reward, check_dataset, is_per_sample
from ppo_lib.rollout import AgentLoopManager, CheckpointEngineManager, LLMServerManager, check_agent_names
from ppo_lib.single_controller import LocalWorkerGroup, ResourcePoolManager, Role, ensure_ray
from ppo_lib.trainer.batch_math import (
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
    extract_reward,
    need_critic,
    need_reference_policy,
)
from ppo_lib.trainer.build import (
    check_context,
    create_dataloaders,
    create_worker_groups,
    default_resource_pool_manager,
    default_role_worker_mapping,
    default_worker_group_cls,
)
from ppo_lib.trainer.checkpoint import STATE, CheckpointStore, damage_named, read_json, write_json
from ppo_lib.trainer.dump import decode_rollouts, dump_generations
from ppo_lib.trainer.metrics import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from ppo_lib.trainer.performance import performance_metrics
from ppo_lib.trainer.preflight import preflight
from ppo_lib.trainer.progress import Progress
from ppo_lib.trainer.randomness import driver_random_state, restore_driver_random_state, seed_everything
from ppo_lib.trainer.stages import PPOStages
from ppo_lib.trainer.timing import marked_timer
from ppo_lib.trainer.tracking import Tracking
from ppo_lib.trainer.validation import ValidationLog
from protocol import DataProto, lineage
from protocol.schema import check_stage_output

__all__ = [
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
    "extract_reward",
    "need_critic",
    "need_reference_policy",
]

StageHook = Callable[[str, DataProto, dict[str, Any]], None]


class RayPPOTrainer(PPOStages):
    """Proximal policy optimisation of a language model from one driver.

    Everything but `config` is optional and, when given, used instead of what the config describes:

    Args:
        config: a `PPOConfig`, a plain dict, or an OmegaConf object.
        tokenizer, processor: loaded from `actor_rollout_ref.model` when None.
        role_worker_mapping: worker class per `Role`.
        resource_pool_manager: which pool each role lives in, and how many slots it has.
        ray_worker_group_cls: `RayWorkerGroup` or `LocalWorkerGroup`; None follows `trainer.worker_group`.
        reward_fn, val_reward_fn: a scorer `(data_source, solution_str, ground_truth, extra_info) -> float | dict`, or a
            callable on the whole `DataProto` that returns (B, R) scores or `{"reward_tensor", "reward_extra_info"}`.
        train_dataset, val_dataset, collate_fn, train_sampler: as for a torch dataloader.
        device_name: "cpu" or "cuda"; None follows `trainer.device`.

    Raises:
        ConfigError, DataError, ModelError: before any worker starts.
    """

    def __init__(
        self,
        config: PPOConfig | dict[str, Any] | Any,
        tokenizer: Any = None,
        processor: Any = None,
        role_worker_mapping: dict[Role, type] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        ray_worker_group_cls: type | None = None,
        reward_fn: Callable[..., Any] | None = None,
        val_reward_fn: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ):
        self.config = as_config(config)
        machine = preflight(self.config, check_train_data=train_dataset is None, check_val_data=val_dataset is None)
        self.device_name = device_name or machine.device
        self.rollout_name = machine.rollout_name
        self.arithmetic = step_arithmetic(self.config, self.rollout_name)
        seed_everything(self.config.trainer.seed)

        model = self.config.actor_rollout_ref.model
        self.model_path = resolve_model_path(model.path)
        tokenizer_path = resolve_model_path(model.tokenizer_path or model.path)
        self.tokenizer = tokenizer or load_tokenizer(
            tokenizer_path, model.trust_remote_code, model.custom_chat_template
        )
        self.processor = processor or load_processor(tokenizer_path, model.trust_remote_code)
        # a scorer of one sample goes into the reward loop, a function of the whole batch takes the loop's place
        self.scorer = reward_fn if reward_fn and is_per_sample(reward_fn) else None
        timeout_s = self.config.reward.timeout_s
        self.reward_fn = as_batch_reward(reward_fn, self.tokenizer) if reward_fn and not self.scorer else None
        self.val_reward_fn = (
            as_batch_reward(val_reward_fn, self.tokenizer, timeout_s) if val_reward_fn else self.reward_fn
        )

        self.train_dataloader, self.val_dataloader = create_dataloaders(
            self.config, self.tokenizer, self.processor, train_dataset, val_dataset, collate_fn, train_sampler
        )
        trainer = self.config.trainer
        self.total_training_steps = trainer.total_training_steps or len(self.train_dataloader) * trainer.total_epochs
        self._check_before_workers(own_reward=reward_fn is not None, own_val_reward=bool(val_reward_fn or reward_fn))

        bypass = self.config.algorithm.rollout_correction.bypass_mode
        self.use_old_log_probs = bypass or need_old_log_probs(self.config, self.rollout_name)
        self.use_critic = need_critic(self.config)
        self.use_reference_policy = need_reference_policy(self.config)
        self.role_worker_mapping = role_worker_mapping or default_role_worker_mapping(self.config)
        self.ray_worker_group_cls = ray_worker_group_cls or default_worker_group_cls(self.config)
        self.resource_pool_manager = resource_pool_manager or default_resource_pool_manager(
            self.config, self.role_worker_mapping, self.device_name
        )
        self.kl_ctrl_in_reward = get_kl_controller(self.config.algorithm.kl_ctrl)
        self.checkpoints = CheckpointStore(
            trainer.default_local_dir, trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep
        )
        self.resume_from = self.checkpoints.resolve(trainer.resume_mode, trainer.resume_from_path)
        self.global_steps = 0
        self.last_saved: Path | None = None
        self._owns_ray = False

    def _check_before_workers(self, own_reward: bool, own_val_reward: bool) -> None:
        """What only model and data can tell: context, scorer and loop of every row, steps left after critic warm-up."""
        check_context(self.config, self.model_path)
        if not own_reward:
            check_dataset(self.config.reward, self.train_dataloader.dataset)
        if not own_val_reward:
            check_dataset(self.config.reward, self.val_dataloader.dataset)
        for loader in (self.train_dataloader, self.val_dataloader):
            check_agent_names(loader.dataset)
        warmup, steps = self.config.trainer.critic_warmup, self.total_training_steps
        if warmup >= steps and not self.config.trainer.val_only:
            raise ConfigError(
                f"trainer.critic_warmup={warmup} of {steps} steps leaves the policy none to learn in; "
                f"set it to {steps - 1} or less, or train longer"
            )

    # ---------------------------------------------------------------- building

    def init_workers(self) -> None:
        """Start the worker groups and the rollout replicas. Ends with the models loaded and the replicas asleep."""
        config, local = self.config, issubclass(self.ray_worker_group_cls, LocalWorkerGroup)
        print(f"{self.arithmetic.table()}\nengine {self.rollout_name} on {self.device_name}", flush=True)
        self._owns_ray = not local and ensure_ray(config.ray_kwargs)
        pools = self.resource_pool_manager
        self.worker_groups = create_worker_groups(
            config,
            self.role_worker_mapping,
            pools,
            self.ray_worker_group_cls,
            self.device_name,
            self._optimizer_steps(),
        )
        actor_role = Role.ActorRolloutRef if Role.ActorRolloutRef in self.worker_groups else Role.ActorRollout
        self.actor_rollout_wg = self.worker_groups[actor_role]
        self.ref_policy_wg = self.worker_groups.get(Role.RefPolicy, self.actor_rollout_wg)
        self.critic_wg = self.worker_groups.get(Role.Critic)
        for group in self.worker_groups.values():
            group.init_model()

        self.server_manager = LLMServerManager.create(
            config.actor_rollout_ref,
            model_path=self.model_path,
            tokenizer=self.tokenizer,
            engine_name=self.rollout_name,
            device_name=self.device_name,
            resource_pool=None if local else pools.get_resource_pool(actor_role),
            num_replicas=self.arithmetic.replicas,
            timeout_s=config.trainer.stage_timeout_s,
        )
        self.checkpoint_manager = CheckpointEngineManager(
            config.actor_rollout_ref.rollout.checkpoint_engine, self.actor_rollout_wg, self.server_manager
        )
        self.reward_loop_manager = RewardLoopManager(config.reward, self.tokenizer, compute_score=self.scorer)
        self.async_rollout_manager = AgentLoopManager(
            config,
            self.tokenizer,
            self.server_manager,
            reward_loop=None if self.reward_fn else self.reward_loop_manager,
        )
        self.checkpoint_manager.sleep_replicas()

    def _optimizer_steps(self) -> dict[Role, int]:
        """Optimizer steps of the whole run, which the learning-rate schedules stretch over."""
        rollouts = self.total_training_steps
        warm = max(0, rollouts - self.config.trainer.critic_warmup)
        actor = warm * self.arithmetic.actor.optimizer_steps_per_rollout
        critic = rollouts * self.arithmetic.critic.optimizer_steps_per_rollout if self.arithmetic.critic else 0
        return {Role.ActorRollout: actor, Role.ActorRolloutRef: actor, Role.Critic: critic}

    # ---------------------------------------------------------------- the run

    def fit(self, on_stage: StageHook | None = None) -> dict[str, float]:
        """Train to the last step. Returns the metrics of the last step (of the validation, for `val_only`).

        `on_stage(stage, batch, metrics)` is called after each stage, with the batch as the stage left it.
        """
        trainer = self.config.trainer
        if "worker_groups" not in self.__dict__:
            raise PPOLibError("there are no workers: call init_workers() before fit(), and close() only after it")
        self._load_checkpoint()
        self.checkpoint_manager.update_weights(self.global_steps)
        tracking = Tracking(
            trainer.logger,
            trainer.default_local_dir,
            trainer.project_name,
            trainer.experiment_name,
            self.config.to_dict(),
            resumed_step=self.global_steps,
        )
        progress = Progress(self.total_training_steps, self.global_steps)
        metrics: dict[str, float] = {}
        try:
            if trainer.val_only or (trainer.val_before_train and self.global_steps == 0):
                metrics = self._validate()
                progress.validated(metrics)
                tracking.log(metrics, self.global_steps)
            while self.global_steps < self.total_training_steps and not trainer.val_only:
                epoch_began_at = self.global_steps
                for batch_dict in self.train_dataloader:
                    for stage, batch, metrics in self.step_through(batch_dict):
                        progress.stage(stage)
                        if on_stage is not None:
                            on_stage(stage, batch, metrics)
                    progress.step(metrics)
                    if any(name.startswith("val-") for name in metrics):
                        progress.validated(metrics)
                    tracking.log(metrics, self.global_steps)
                    if self.global_steps >= self.total_training_steps:
                        break
                if self.global_steps == epoch_began_at:
                    raise DataError("an epoch of training data gave no batch: its sampler yields too few rows")
        finally:
            progress.close()
            tracking.close()
            if self.config.ray_kwargs.timeline_json_file:
                write_timeline(self.config.ray_kwargs.timeline_json_file)
        print(progress.summary(self.checkpoints.root, trainer.logger, self.last_saved), flush=True)
        return metrics

    def step_through(self, batch_dict: dict[str, Any]) -> Iterator[tuple[str, DataProto, dict[str, Any]]]:
        """One step of PPO, stage by stage: yields `(stage, batch, metrics)` after each.

        `fit()` is this in a loop. The stage names are those of `timing_s/...`; `metrics` is one dict that fills up,
        complete when the generator ends.
        """
        trainer = self.config.trainer
        self.global_steps += 1
        is_last_step = self.global_steps >= self.total_training_steps
        epoch = self.train_dataloader.epoch_of_last_batch
        metrics: dict[str, Any] = {"training/global_step": self.global_steps, "training/epoch": epoch}
        timing: dict[str, float] = {}
        seen: set[str] = set()

        def done(stage: str) -> tuple[str, DataProto, dict[str, Any]]:
            if trainer.checks:
                check_stage_output(batch, stage, seen)
            seen.update(batch.field_names())
            return stage, batch, metrics

        with running("dataloader", timing):
            batch = self._load_batch(batch_dict, epoch, self.global_steps)
        yield done("dataloader")

        with running("gen", timing):
            if self.config.algorithm.filter_groups.enable:
                batch = self._generate_varied_groups(batch, metrics)
            else:
                gen_batch = self._get_gen_batch(batch)
                gen_output = self._generate(gen_batch)
                batch = self._join_rollouts(batch, gen_output)
        metrics.update(batch.meta_info.pop("rollout_stats", {}))
        yield done("gen")

        with running("balance", timing):
            batch = self._balance_batch(batch, metrics)
        yield done("balance")

        with running("reward", timing):
            batch = self._compute_reward(batch)
        yield done("reward")

        if self.use_old_log_probs:
            with running("old_log_prob", timing):
                fields, old_metrics = self._compute_old_log_prob(batch)
                batch = batch.union(fields)
            metrics.update(old_metrics)
            yield done("old_log_prob")

        if self.use_reference_policy:
            with running("ref", timing):
                batch = batch.union(self._compute_ref_log_prob(batch))
            yield done("ref")

        if self.use_critic:
            with running("values", timing):
                batch = batch.union(self._compute_values(batch))
            yield done("values")

        with running("adv", timing):
            batch, adv_metrics = self._compute_advantage(batch)
        metrics.update(adv_metrics)
        yield done("adv")

        if self.use_critic:
            with running("update_critic", timing):
                metrics.update(self._update_critic(batch))
            yield done("update_critic")

        if self.global_steps > trainer.critic_warmup:  # until then only the critic learns
            with running("update_actor", timing):
                actor_metrics = self._update_actor(batch)
            # where the entropy was measured before the update already, that is the one to report
            metrics.update({name: value for name, value in actor_metrics.items() if name not in metrics})
            yield done("update_actor")

        self.train_dataloader.update_sampler(batch)
        if trainer.rollout_data_dir:
            self._dump_rollouts(batch, trainer.rollout_data_dir)

        if trainer.save_freq > 0 and (is_last_step or self.global_steps % trainer.save_freq == 0):
            with running("save_checkpoint", timing):
                self._save_checkpoint()
            yield done("save_checkpoint")

        with running("update_weights", timing):
            self.checkpoint_manager.update_weights(self.global_steps)
        yield done("update_weights")

        if trainer.test_freq > 0 and (is_last_step or self.global_steps % trainer.test_freq == 0):
            with running("testing", timing):
                metrics.update(self._validate())
            yield done("testing")

        timing["step"] = sum(timing.values())  # whoever looks at a stage may take their time
        metrics.update(compute_data_metrics(batch, use_critic=self.use_critic))
        metrics.update(compute_timing_metrics(batch, timing))
        metrics.update(compute_throughout_metrics(batch, timing, n_gpus=self.arithmetic.world_size))
        metrics.update(performance_metrics({self.actor_rollout_wg, self.ref_policy_wg, self.critic_wg}))

    # ---------------------------------------------------------------- validation

    def _validate(self) -> dict[str, float]:
        """Generate with `rollout.val_kwargs` on the validation set, score, and reduce by `data_source`."""
        sampling, log = self.config.actor_rollout_ref.rollout.val_kwargs, ValidationLog()
        self.checkpoint_manager.wake_replicas()
        for batch_dict in self.val_dataloader:
            batch = self._load_batch(batch_dict, epoch=0, global_steps=self.global_steps)
            gen_batch = self._get_gen_batch(batch)
            gen_batch.meta_info.update(validate=True, unscored=self.val_reward_fn is not None)
            gen_batch.meta_info["temperature"] = sampling.temperature
            gen_output = self.async_rollout_manager.generate_sequences(gen_batch.repeat(sampling.n, interleave=True))
            batch = self._join_rollouts(batch, gen_output)
            if self.val_reward_fn is not None:
                scores, extra = self.val_reward_fn(batch)
            else:
                scores, extra = extract_reward(batch)
            batch.batch["token_level_scores"] = scores
            log.add(batch, extra, decode_rollouts(batch, self.tokenizer))
        directory, shown = self.config.trainer.validation_data_dir, self.config.trainer.log_val_generations
        if directory:
            dump_generations(directory, self.global_steps, log.samples)
        if shown:
            dump_generations(self.checkpoints.root / "val_generations", self.global_steps, log.samples[:shown])
        return log.metrics()

    def _dump_rollouts(self, batch: DataProto, directory: str) -> None:
        """Write this step's rollouts as text."""
        keep = ~batch.batch["is_padding"]
        texts = decode_rollouts(batch, self.tokenizer)
        scores = batch.batch["token_level_scores"].sum(dim=-1).tolist()
        samples = [
            {"input": prompt, "output": response, "score": score}
            for (prompt, response), score, kept in zip(texts, scores, keep.tolist())
            if kept
        ]
        dump_generations(directory, self.global_steps, samples)

    # ---------------------------------------------------------------- saving and resuming

    def _save_checkpoint(self) -> None:
        """Everything that changes during a run: models, optimizers, schedules, random states, data position, KL."""
        with self.checkpoints.writing(self.global_steps) as folder:
            self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), self.global_steps)
            if (exported := folder / "actor" / "huggingface").is_dir():
                self.tokenizer.save_pretrained(exported)
            if self.critic_wg is not None:
                self.critic_wg.save_checkpoint(str(folder / "critic"), self.global_steps)
            torch.save(self.train_dataloader.state_dict(), folder / "data.pt")
            write_json(
                folder / STATE,
                {
                    "global_steps": self.global_steps,
                    "kl_ctrl_in_reward": self.kl_ctrl_in_reward.state_dict(),
                    "random": driver_random_state(),
                },
            )
        self.last_saved = self.checkpoints.path(self.global_steps)

    def _load_checkpoint(self) -> None:
        """Go back to the checkpoint that `resume_mode` chose, if there is one."""
        if self.resume_from is None:
            return
        folder = self.resume_from
        self.actor_rollout_wg.load_checkpoint(str(folder / "actor"))
        if self.critic_wg is not None:
            self.critic_wg.load_checkpoint(str(folder / "critic"))
        state = read_json(folder / STATE)
        with damage_named(folder):
            position = torch.load(folder / "data.pt", weights_only=True)
            self.kl_ctrl_in_reward.load_state_dict(state["kl_ctrl_in_reward"])
            restore_driver_random_state(state["random"])
            self.global_steps = int(state["global_steps"])
        self.train_dataloader.load_state_dict(position)
        print(f"resumed from {folder} at step {self.global_steps}", flush=True)

    def close(self) -> None:
        """Stop replicas, reward loop and worker groups, and Ray if this trainer started it. May be repeated."""
        for name in ("async_rollout_manager", "reward_loop_manager", "server_manager"):
            part = self.__dict__.pop(name, None)
            if part is not None:
                part.shutdown() if hasattr(part, "shutdown") else part.close()
        for group in self.__dict__.pop("worker_groups", {}).values():
            group.shutdown()
        if self._owns_ray:
            import ray

            ray.shutdown()
            self._owns_ray = False


@contextmanager
def running(stage: str, timing: dict[str, float]) -> Iterator[None]:
    """Time a stage and put its name on what happens to the envelope meanwhile."""
    with lineage.stage(stage), marked_timer(stage, timing):
        yield


def write_timeline(file: str) -> None:
    """Write Ray's timeline of the run so far, where Ray runs."""
    import ray

    if ray.is_initialized():
        ray.timeline(filename=file)
