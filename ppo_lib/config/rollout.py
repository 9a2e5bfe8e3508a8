"""Section `actor_rollout_ref.rollout`: how responses are generated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ppo_lib.config.base import ConfigModel, Fraction, OpenDict, Positive, Seed, Strings, TokenIds, Workers, follow

_TopK = Annotated[int, Field(ge=-1)]
_TopP = Annotated[float, Field(gt=0.0, le=1.0)]


class ValKwargsConfig(ConfigModel):
    """Sampling during validation."""

    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """Sampling temperature; used where `do_sample` is true."""
    top_k: _TopK = -1
    """Sample among the k likeliest tokens; -1 is all."""
    top_p: _TopP = 1.0
    """Sample among the likeliest tokens that make up this probability."""
    n: Positive = 1
    """Responses per validation prompt."""
    do_sample: bool = False
    """Sample; false takes the likeliest token each time."""


class AgentConfig(ConfigModel):
    """What turns a prompt into a response, and where it runs."""

    num_workers: Workers | None = None
    """Ray actors that run agent loops; 0 is the driver itself, null is min(8, cores)."""
    default_agent_loop: str = "single_turn_agent"
    """The loop for rows whose column `agent_name` names none."""


class CheckpointEngineConfig(ConfigModel):
    """How weights travel from the actor to the rollout replicas."""

    backend: str = "naive"
    """Name of the checkpoint engine."""
    update_weights_bucket_megabytes: Positive = 2048
    """Size of one bucket of weights; one is under way at a time."""


class EngineKwargsConfig(ConfigModel):
    """Arguments handed to an engine as they are."""

    sglang: OpenDict = {}
    """Keyword arguments of sglang's engine, passed on as they are."""


class RolloutConfig(ConfigModel):
    """How responses are generated."""

    name: Literal["auto", "hf", "sglang"] = "auto"
    """The engine; `auto` is sglang where it is installed and there is a GPU, and hf elsewhere."""
    n: Positive = 1
    """Responses per training prompt: the size of a group."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature; log-probs are scaled by it."""
    top_k: _TopK = -1
    """Sample among the k likeliest tokens; -1 is all."""
    top_p: _TopP = 1.0
    """Sample among the likeliest tokens that make up this probability."""
    do_sample: bool = True
    """Sample; false takes the likeliest token each time."""
    ignore_eos: bool = False
    """Generate on to the full length, past the end token."""
    stop: Strings = ()
    """Strings that end a response; they stay in it."""
    stop_token_ids: TokenIds = ()
    """Token ids that end a response, besides the end token."""
    seed: Seed = follow("${trainer.seed}", 42)
    """Seed from which each sample's own seed is derived."""
    prompt_length: Positive = follow("${data.max_prompt_length}", 512)
    """Prompt width in tokens."""
    response_length: Positive = follow("${data.max_response_length}", 512)
    """Most tokens of a response."""
    dtype: Literal["bfloat16", "bf16", "float32", "fp32"] = follow(
        "${actor_rollout_ref.actor.fsdp_config.dtype}", "bfloat16"
    )
    """Type of the replicas' weights (float32 where a CPU lacks bfloat16 arithmetic); null is the actor's."""
    calculate_log_probs: bool = True
    """Return the log-prob of each sampled token, to compare with the actor's."""
    max_num_seqs: Positive = 256
    """Most responses one replica generates at a time."""
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    """Sampling during validation."""
    log_prob_micro_batch_size_per_gpu: Positive | None = None
    """Rows per forward of the actor's log-prob pass on one rank; null packs rows up to the token cap."""
    log_prob_use_dynamic_bsz: bool = follow("${actor_rollout_ref.actor.use_dynamic_bsz}", False)
    """Pack rows up to the token cap even where a micro-batch size is set."""
    log_prob_max_token_len_per_gpu: Positive = follow("${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}", 16384)
    """The token cap of one micro-batch of the actor's log-prob pass on one rank."""
    agent: AgentConfig = AgentConfig()
    """Who runs the agent loops."""
    checkpoint_engine: CheckpointEngineConfig = CheckpointEngineConfig()
    """How weights reach the replicas."""
    max_num_batched_tokens: Positive = 8192
    """Most prompt tokens read in one forward pass."""
    enable_chunked_prefill: bool = True
    """Read prompts longer than `max_num_batched_tokens` in pieces."""
    max_model_len: Positive | None = None
    """Longest prompt and response together; null is the sum of their widths."""
    free_cache_engine: bool = True
    """Give the memory of the key-value cache back while a replica sleeps."""
    load_format: str = "dummy"
    """How a replica fills its weights at the start; dummy leaves that to the first update, auto reads the files."""
    tensor_model_parallel_size: Positive = 1
    """Ranks that hold one replica together (sglang)."""
    gpu_memory_utilization: Annotated[Fraction, Field(gt=0.0)] = 0.5
    """Share of a GPU's memory for the weights and the cache of a replica (sglang)."""
    enforce_eager: bool = False
    """No CUDA graphs (sglang)."""
    enable_prefix_caching: bool = True
    """Share the cache of equal prompt beginnings (sglang)."""
    request_timeout_s: Annotated[float, Field(gt=0.0)] = follow("${trainer.stage_timeout_s}", 3600.0)
    """Longest wait for one response; null follows `trainer.stage_timeout_s`."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often one replica that died or hangs is started again; its unfinished requests then run again."""
    engine_kwargs: EngineKwargsConfig = EngineKwargsConfig()
    """Arguments handed to an engine as they are."""
