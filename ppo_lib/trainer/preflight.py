"""What only files and machine can tell, checked before anything is started; the cheap checks first.

A configuration can be right in itself and still name a file that is not there, or more ranks than the machine has.
Nothing here starts Ray or loads a model, and torch is loaded only to ask about GPUs.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from ppo_lib.config import PPOConfig, need_critic
from ppo_lib.config.arithmetic import world_size
from ppo_lib.config.effects import engine_notices
from ppo_lib.config.suggest import did_you_mean
from ppo_lib.data import open_data, sampler_class
from ppo_lib.errors import ConfigError, DataError, ModelError
from ppo_lib.load_object import load_object
from ppo_lib.models.resolve import BUILTIN_PREFIX, check_model_path
from ppo_lib.reward.function import load_reward_fn
from ppo_lib.reward.managers import check_manager
from ppo_lib.single_controller import available_cores

logger = logging.getLogger("ppo_lib.config")


@dataclass(frozen=True)
class Machine:
    """What the run gets: "cpu" or "cuda", the rollout engine, the number of ranks, and the cores of this machine."""

    device: str
    rollout_name: str
    world_size: int
    cores: int


def preflight(config: PPOConfig, *, check_train_data: bool = True, check_val_data: bool = True) -> Machine:
    """Check files, then the machine; say what the machine gives.

    `check_train_data` and `check_val_data` are for callers that bring the dataset as an object.
    Raises ConfigError, DataError or ModelError that names the setting, what was found, and what to change.
    """
    check_files(config, check_train_data=check_train_data, check_val_data=check_val_data)
    device = _device(config)
    cores = available_cores()
    _check_ranks(config, device, cores)
    _check_optimizers(config)
    engine = _engine(config, device)
    return Machine(device=device, rollout_name=engine, world_size=world_size(config), cores=cores)


def check_files(config: PPOConfig, *, check_train_data: bool = True, check_val_data: bool = True) -> None:
    """Data, reward, model and output folder: everything the configuration names exists and can be used."""
    _check_data(config, check_train_data, check_val_data)
    _check_reward(config)
    for key, path in _model_paths(config).items():
        _check_model(key, path)
    for key, path in _adapter_paths(config).items():
        _check_adapter(key, path)
    _check_output_folder(config.trainer.default_local_dir)


def _check_data(config: PPOConfig, check_train: bool, check_val: bool) -> None:
    data = config.data
    sampler_class(data)
    if data.custom_cls.path:
        load_object(
            data.custom_cls.path, data.custom_cls.name or "", "data.custom_cls"
        )  # it opens the files its own way
        return
    if check_train:
        rows = len(open_data(data.train_files, data, is_train=True))
        used = rows if data.train_max_samples < 0 else min(rows, data.train_max_samples)
        if used < data.gen_batch_size:
            key = "data.train_batch_size" if data.gen_batch_size == data.train_batch_size else "data.gen_batch_size"
            limit = "" if used == rows else f" (data.train_max_samples={data.train_max_samples} of {rows})"
            raise DataError(
                f"data.train_files has {used} rows{limit}, fewer than {key}={data.gen_batch_size};"
                f" set {key} to {used} or less, or add data"
            )
    if check_val:
        open_data(data.val_files, data, is_train=False)


def _check_reward(config: PPOConfig) -> None:
    load_reward_fn(config.reward)
    check_manager(config.reward)


def _model_paths(config: PPOConfig) -> dict[str, str]:
    model = config.actor_rollout_ref.model
    paths = {
        "actor_rollout_ref.model.path": model.path,
        "actor_rollout_ref.model.tokenizer_path": model.tokenizer_path,
        "actor_rollout_ref.model.hf_config_path": model.hf_config_path,
    }
    if need_critic(config):
        paths["critic.model.path"] = config.critic.model.path
        paths["critic.model.hf_config_path"] = config.critic.model.hf_config_path
    return {key: path for key, path in paths.items() if path}


def _adapter_paths(config: PPOConfig) -> dict[str, str]:
    paths = {"actor_rollout_ref.model.lora_adapter_path": config.actor_rollout_ref.model.lora_adapter_path}
    if need_critic(config):
        paths["critic.model.lora_adapter_path"] = config.critic.model.lora_adapter_path
    return {key: path for key, path in paths.items() if path}


def _check_adapter(key: str, path: str) -> None:
    from ppo_lib.workers.lora import adapter_config

    try:
        adapter_config(Path(path).expanduser())
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from None


def _check_model(key: str, path: str) -> None:
    try:
        check_model_path(path)
        if not path.startswith(BUILTIN_PREFIX) and not Path(path).expanduser().is_dir():
            _check_hub(path)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from None


def _check_hub(repo: str) -> None:
    """Raise `ModelError` unless a Hugging Face id is in the local cache or on the hub."""
    import huggingface_hub as hub
    from huggingface_hub.utils import GatedRepoError, HfHubHTTPError

    name = "config.json"
    if isinstance(hub.try_to_load_from_cache(repo, name), str):
        return
    nearby = "it is neither a folder here nor in the local Hugging Face cache"
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(repo, name), timeout=10)
    except GatedRepoError:
        raise ModelError(f"{repo!r} is gated on the Hugging Face hub; log in with an account that may use it") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise ModelError(f"{nearby}, and the Hugging Face hub answers {status} for {repo!r}") from None
    except Exception as error:  # no network: a different class for each cause and version
        raise ModelError(f"{nearby}, and the Hugging Face hub cannot be reached for {repo!r} ({error})") from None


def _check_output_folder(folder: str) -> None:
    path = Path(folder).expanduser().absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    key = f"trainer.default_local_dir={folder}"
    if not nearest.is_dir():
        raise ConfigError(f"{key}: {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: cannot write to {nearest}; name a folder that you may write to")


def _device(config: PPOConfig) -> str:
    wanted = config.trainer.device
    if wanted == "cpu":
        return wanted
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise ConfigError("trainer.device=cuda, but torch finds no GPU here; set trainer.device to cpu or auto")
    return "cpu"


def _engine(config: PPOConfig, device: str) -> str:
    """The rollout engine; that the loop that drives it and the way of its weights exist."""
    from ppo_lib.rollout import resolve_engine_name
    from ppo_lib.rollout.agent_loop import agent_loop_class
    from ppo_lib.rollout.checkpoint_engine import checkpoint_engine_factory
    from ppo_lib.rollout.sglang.arguments import check_rollout

    rollout = config.actor_rollout_ref.rollout
    agent_loop_class(rollout.agent.default_agent_loop)
    checkpoint_engine_factory(rollout.checkpoint_engine.backend)
    engine = resolve_engine_name(rollout.name, device)
    if engine == "sglang":
        check_rollout(rollout, device)
    for line in engine_notices(config, engine, device):
        logger.warning(line)
    return engine


def _check_optimizers(config: PPOConfig) -> None:
    from ppo_lib.workers.optim import check_optimizer

    actor, critic = config.actor_rollout_ref.actor.optim, config.critic.optim
    for key, optim in (("actor_rollout_ref.actor", actor), ("critic", critic))[: 1 + need_critic(config)]:
        try:
            module = importlib.import_module(optim.optimizer_impl)
        except ImportError as error:
            raise ConfigError(
                f"{key}.optim.optimizer_impl={optim.optimizer_impl} cannot be imported: {error}"
            ) from None
        if not hasattr(module, optim.optimizer):
            hint = did_you_mean(optim.optimizer, vars(module))
            raise ConfigError(f"{key}.optim.optimizer={optim.optimizer} is not in {optim.optimizer_impl}{hint}")
        try:
            check_optimizer(optim)
        except ConfigError as error:
            raise ConfigError(f"{key}.{error}") from None


def _check_ranks(config: PPOConfig, device: str, cores: int) -> None:
    """Raise `ConfigError` if this machine cannot hold the ranks; a cluster that runs already is asked when joined."""
    trainer, ray_init = config.trainer, config.ray_kwargs.ray_init
    if trainer.worker_group == "local":
        return
    address = ray_init.address or os.environ.get("RAY_ADDRESS", "local")
    if address != "local":
        return
    if trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes} needs a running Ray cluster; set ray_kwargs.ray_init.address (or the"
            " environment variable RAY_ADDRESS) to it, or trainer.nnodes to 1"
        )
    ranks, key = trainer.n_gpus_per_node, "trainer.n_gpus_per_node"
    if device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        if ranks > gpus:
            raise ConfigError(f"{key}={ranks}, but there are {gpus} GPUs here; set {key} to {gpus} or less")
        return
    cpus = ray_init.num_cpus or cores
    if ranks > cpus:
        found = f"ray_kwargs.ray_init.num_cpus is {cpus}" if ray_init.num_cpus else f"this machine has {cores} cores"
        raise ConfigError(
            f"{key}={ranks} ranks on the CPU, but {found}; set {key} to {cpus} or less"
            f" (or ray_kwargs.ray_init.num_cpus to {ranks}, so that they share cores)"
        )
