"""Section `model`: which network, from where, under the actor and under the critic."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ppo_lib.config.base import ConfigModel, OpenDict, Positive, follow

_DEFAULT_PATH = "~/models/deepseek-llm-7b-chat"
_Path = Annotated[str, Field(min_length=1)]


class NetworkConfig(ConfigModel):
    """A network and how its workers load it."""

    path: _Path = _DEFAULT_PATH
    """`builtin:NAME`, a local folder with a config.json, or a Hugging Face id."""
    hf_config_path: str | None = None
    """Folder or Hugging Face id with the model's configuration; null is `path`."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""
    external_lib: str | None = None
    """A module imported in every worker before the model is loaded (to register an architecture)."""
    override_config: OpenDict = {}
    """Values set on the model's own configuration before it is built."""
    enable_gradient_checkpointing: bool = True
    """Recompute each block's activations in the backward pass: less memory, about a third more time."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Train a low-rank adapter (LoRA, through peft) of this rank in place of the weights; 0 trains the weights."""
    lora_alpha: Positive = 16
    """The adapter's output is scaled by this over the rank."""
    target_modules: Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Layers that get an adapter: `all-linear` (heads excepted), a list of names, or a regular expression."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Layers that get none, as a list of names or a regular expression."""
    lora_adapter_path: _Path | None = None
    """An adapter in peft's format to go on from; rank, alpha and layers are then those of its adapter_config.json."""


class ModelConfig(NetworkConfig):
    """The policy's model."""

    tokenizer_path: str = follow("${actor_rollout_ref.model.path}", _DEFAULT_PATH)
    """Where the tokenizer comes from, in the same forms as `path`."""
    custom_chat_template: str | None = None
    """A Jinja chat template in place of the tokenizer's."""


class CriticModelConfig(NetworkConfig):
    """The network under the value head; the actor's, unless told otherwise."""

    path: _Path = follow("${actor_rollout_ref.model.path}", _DEFAULT_PATH)
    """`builtin:NAME`, a local folder with a config.json, or a Hugging Face id."""
    trust_remote_code: bool = follow("${actor_rollout_ref.model.trust_remote_code}", False)
    """Allow code that comes with the model to run."""
