"""From the configuration to the arguments of `sglang.Engine`."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from ppo_lib.config import ActorRolloutRefConfig, RolloutConfig
from ppo_lib.errors import ConfigError, RolloutError
from ppo_lib.rollout.sglang.versions import check_arguments

LOADER = "ppo_lib.rollout.sglang.loader.load"
RESERVED = 8  # positions that SGLang keeps for itself out of a context
TAKEN = (
    *("model_path", "tokenizer_path", "dtype", "context_length", "custom_weight_loader", "load_format", "device"),
    *("tp_size", "dp_size", "pp_size", "nnodes", "node_rank"),  # weights are counted for the ranks of one group
)
"""Arguments that follow from other keys of the configuration and cannot be passed through."""

_CPU_CACHE_TOKENS = 32768  # unless engine_kwargs.sglang.max_total_tokens says otherwise
_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
    # Unless told, SGLang takes off as much for activations as a GPU needs, which may be more than the machine has.
    "mem_fraction_static": 0.9,
}


def check_rollout(rollout: RolloutConfig, device: str) -> None:
    """Refuse what this engine cannot do, before anything starts.

    Args:
        rollout: The section `rollout`.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: `engine_kwargs.sglang` names an argument that the installed version does not have, or two settings
            do not go together here.
    """
    check_arguments(rollout.engine_kwargs.sglang, TAKEN)
    if rollout.ignore_eos and (rollout.stop or rollout.stop_token_ids):
        key = "stop" if rollout.stop else "stop_token_ids"
        raise ConfigError(
            f"rollout.ignore_eos=true and rollout.{key}: with ignore_eos sglang ignores every stop; leave one of them "
            "out, or use rollout.name=hf"
        )
    if device == "cpu" and rollout.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} needs GPUs; set it to 1 on a CPU"
        )


def engine_arguments(
    config: ActorRolloutRefConfig, model_path: str, device: str, context: int, dtype: str, tokenizer_path: str | None
) -> dict[str, Any]:
    """What `sglang.Engine` is called with.

    Args:
        config: The section `actor_rollout_ref`.
        model_path: A local folder or Hugging Face id.
        device: `cpu` or `cuda`.
        context: Positions of the engine's context, those that SGLang reserves included.
        dtype: `float32` or `bfloat16`.
        tokenizer_path: Where the tokenizer lies; None starts the engine without one.

    Raises:
        ConfigError: See `check_rollout`; or the model's configuration lies elsewhere.
    """
    rollout = config.rollout
    check_rollout(rollout, device)
    if config.model.hf_config_path not in (None, config.model.path, model_path):
        raise ConfigError(
            f"actor_rollout_ref.model.hf_config_path={config.model.hf_config_path}: sglang reads the one that lies "
            "beside the model; put it there, or use model.override_config or rollout.name=hf"
        )
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "load_format": rollout.load_format,
        "dtype": dtype,
        "device": device,
        "context_length": context,
        "trust_remote_code": config.model.trust_remote_code,
        "tp_size": rollout.tensor_model_parallel_size,
        "max_running_requests": rollout.max_num_seqs,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "chunked_prefill_size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "random_seed": rollout.seed,
        "skip_server_warmup": True,
        "skip_tokenizer_init": tokenizer_path is None,
        "custom_weight_loader": [LOADER],
    }
    if tokenizer_path is not None:
        arguments["tokenizer_path"] = tokenizer_path
    if config.model.override_config:
        arguments["json_model_override_args"] = json.dumps(dict(config.model.override_config))
    arguments |= _of_cpu(rollout, context) if device == "cpu" else _of_cuda(rollout)
    return {**arguments, **rollout.engine_kwargs.sglang}


def _of_cpu(rollout: RolloutConfig, context: int) -> dict[str, Any]:
    # Unless told, SGLang sizes its cache from the machine's whole memory.
    enough = rollout.max_num_seqs * context
    arguments = {**_CPU, "max_total_tokens": min(enough, max(_CPU_CACHE_TOKENS, context))}
    if rollout.engine_kwargs.sglang.get("enable_deterministic_inference"):
        # The choice is checked against backends with deterministic kernels, then these two are what runs.
        arguments |= {"attention_backend": "triton"} | {
            f"{part}_attention_backend": "torch_native" for part in ("prefill", "decode")
        }
    return arguments


def _of_cuda(rollout: RolloutConfig) -> dict[str, Any]:
    return {
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "disable_cuda_graph": rollout.enforce_eager,
        "enable_memory_saver": rollout.free_cache_engine,
    }


def check_ports(arguments: dict[str, Any]) -> None:
    """Refuse ports that are taken, which the engine would report late or not at all.

    Raises:
        RolloutError: A port that `engine_kwargs.sglang` asks for is in use.
    """
    for name, port in arguments.items():
        if name.endswith("_port") and isinstance(port, int):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("", port))
                except OSError as error:
                    raise RolloutError(
                        f"engine_kwargs.sglang.{name}={port}: this port is in use ({error.strerror}); "
                        "choose another, or leave it out and a free one is taken"
                    ) from None


def host_environment(device: str, folder: str, visible_devices: str | None) -> dict[str, str]:
    """The environment of the engine's processes.

    Args:
        device: `cpu` or `cuda`.
        folder: Where they put their sockets and files.
        visible_devices: The GPUs to use; None keeps this process's.
    """
    environment = {**os.environ, "TMPDIR": folder, "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    if device == "cpu":
        # One thread unless asked otherwise: on a busy machine SGLang's threads wait for one another, thirtyfold.
        environment = {"OMP_NUM_THREADS": "1", **environment, "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    if visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices
    return environment
