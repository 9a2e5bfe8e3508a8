"""Building the transformers model that the `hf` engine decodes with."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ppo_lib.config import ActorRolloutRefConfig, RolloutConfig
from ppo_lib.errors import ModelError, RolloutError
from ppo_lib.models import resolve_model_path
from ppo_lib.models.dtypes import computed_dtype
from ppo_lib.rollout.attention import register_decode_attention
from ppo_lib.workers.fused import fuse_layers

_CACHEABLE = {"full_attention", "sliding_attention", "chunked_attention"}


def load_model(config: ActorRolloutRefConfig, model_path: str, device: torch.device) -> PreTrainedModel:
    """The model in evaluation mode on `device`.

    With `rollout.load_format=dummy` its weights are whatever lay in memory: they come with the first update, and
    reading a checkpoint that is then overwritten would be the longest part of a start. The global random state is
    left alone.

    Raises:
        ModelError: The model cannot be built from its folder or id.
        RolloutError: The model's cache cannot hold rows that come and go.
    """
    dtype = computed_dtype(config.rollout.dtype, device)
    trust = config.model.trust_remote_code
    try:
        hf_config = model_config(config, model_path)
        _refuse_stateful(hf_config)
        options: dict[str, Any] = {
            "dtype": dtype,
            "attn_implementation": _attention(hf_config),
            "trust_remote_code": trust,
        }
        with torch.random.fork_rng(devices=[]):
            if config.rollout.load_format == "dummy":
                with _uninitialised():
                    model = AutoModelForCausalLM.from_config(hf_config, **options)
                model.tie_weights()
            else:
                model = AutoModelForCausalLM.from_pretrained(model_path, config=hf_config, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the rollout engine cannot load the model {model_path}: {error}") from error
    if getattr(model, "_is_stateful", False):
        raise _stateful(hf_config)
    model.requires_grad_(False)
    if device.type == "cpu":
        fuse_layers(model, packed=False)
        if dtype == torch.float32:
            _store_transposed(model)
    return model.eval().to(device)  # type: ignore[arg-type]


def _store_transposed(model: PreTrainedModel) -> None:
    """Keep the weights of linear layers in memory column by column; values, names and shapes stay as they are.

    With the few rows of a decoding step MKL multiplies such a weight in 0.6 to 0.9 of the time (8 to 128 rows).
    """
    tied = model.get_input_embeddings().weight
    for module in model.modules():
        if type(module) is nn.Linear and module.weight is not tied:
            module.weight.data = module.weight.data.t().contiguous().t()


def model_config(config: ActorRolloutRefConfig, model_path: str) -> Any:
    """The model's own configuration, changed as the section `model` says."""
    if config.model.external_lib:
        importlib.import_module(config.model.external_lib)
    source = config.model.hf_config_path
    source = resolve_model_path(source) if source else model_path
    hf_config = AutoConfig.from_pretrained(source, trust_remote_code=config.model.trust_remote_code)
    for key, value in config.model.override_config.items():
        setattr(hf_config, key, value)
    return hf_config


def model_outline(config: ActorRolloutRefConfig, model_path: str) -> PreTrainedModel:
    """The model without memory: its parameters' names and shapes, on the meta device.

    Raises:
        ModelError: It cannot be built from its folder or id.
    """
    try:
        hf_config = model_config(config, model_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the rollout engine cannot load the model {model_path}: {error}") from error
    model.tie_weights()
    return model


def context_length(rollout: RolloutConfig, hf_config: Any) -> int:
    """Most tokens of prompt and response together.

    Raises:
        RolloutError: `rollout.max_model_len` is more than the model has positions.
    """
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    asked = rollout.max_model_len
    if asked is not None and limit is not None and asked > limit:
        raise RolloutError(
            f"rollout.max_model_len is {asked}; this model has {limit} positions, so set it to at most {limit}"
        )
    wanted = asked if asked is not None else rollout.prompt_length + rollout.response_length
    return wanted if limit is None else min(wanted, limit)


def end_token_ids(model: PreTrainedModel, model_path: str, tokenizer: Any | None) -> frozenset[int]:
    """The tokens that end a response of this model: its generation config's, its config's and the tokenizer's."""
    try:
        found = [GenerationConfig.from_pretrained(model_path).eos_token_id]
    except OSError:
        found = []
    found += [model.config.get_text_config().eos_token_id, getattr(tokenizer, "eos_token_id", None)]
    return frozenset(i for one in found if one is not None for i in (one if isinstance(one, list) else [one]))


def forward_accepts(model: PreTrainedModel, argument: str) -> bool:
    """Whether the model's forward has this argument."""
    return argument in inspect.signature(model.forward).parameters


def _attention(hf_config: Any) -> str:
    """Ours, unless the scores are capped or have sinks, which scaled_dot_product_attention would leave out."""
    text = hf_config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) is not None or text.model_type == "gpt_oss":
        return "eager"
    return register_decode_attention()


def _refuse_stateful(hf_config: Any) -> None:
    kinds = set(getattr(hf_config.get_text_config(), "layer_types", None) or ())
    if kinds - _CACHEABLE:
        raise _stateful(hf_config)


def _stateful(hf_config: Any) -> RolloutError:
    return RolloutError(
        f"rollout.name=hf cannot decode {hf_config.model_type}: it has layers that keep a running state instead of "
        "keys and values, and rows could not join or leave"
    )


def _uninitialised() -> Any:
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights  # type: ignore[attr-defined]
    return no_init_weights()
