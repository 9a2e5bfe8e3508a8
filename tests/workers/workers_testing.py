"""Small models, small batches, and several ranks without Ray."""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import sys
import traceback
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from ppo_lib.config import load_config
from ppo_lib.workers import ActorRolloutRefWorker, CriticWorker
from ppo_lib.workers.fsdp_engine import local_tensor
from protocol import DataProto, no_padding_2_padding
from protocol import tensordict_utils as tu
from protocol.no_padding import left_right_2_no_padding

VOCAB, PROMPT_WIDTH, RESPONSE_WIDTH = 61, 9, 12


def save_tiny_model(folder: Path, family: str = "llama", **settings: Any) -> str:
    """A random model of 30k parameters in a folder; every call with the same arguments gives the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, Any] = dict(  # noqa: C408
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        pad_token_id=0,
        initializer_range=0.2,  # logits far from uniform, so that a wrong number shows
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**shape, **settings}))
    model.save_pretrained(folder)
    return str(folder)


def config(model_path: str, *overrides: str) -> Any:
    """A whole configuration in fp32 around a model, whose every layer is a unit of FSDP, however small."""
    return load_config(
        overrides=[
            f"actor_rollout_ref.model.path={model_path}",
            "actor_rollout_ref.model.tokenizer_path=builtin:tiny-llama",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.ref.fsdp_config.dtype=float32",
            "actor_rollout_ref.rollout.dtype=float32",
            f"data.max_prompt_length={PROMPT_WIDTH}",
            f"data.max_response_length={RESPONSE_WIDTH}",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "critic.model.enable_gradient_checkpointing=false",
            "critic.fsdp.dtype=float32",
            "critic.optim.lr=1e-2",
            *one_unit_below(0),
            *overrides,
        ]
    )


def one_unit_below(parameters: int) -> list[str]:
    """Overrides: a model with fewer parameters is a single unit of FSDP."""
    sections = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
    return [f"{section}.wrap_policy.min_num_params={parameters}" for section in sections]


def padded_batch(rows: int = 8, seed: int = 0, left: int = 0, right: int = 0) -> dict[str, torch.Tensor]:
    """Rows of different lengths, as the driver holds them; `left` and `right` add columns of padding only."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    prompts, responses = draw(1, PROMPT_WIDTH + 1, rows), draw(1, RESPONSE_WIDTH + 1, rows)
    ids = draw(1, VOCAB, rows, PROMPT_WIDTH + RESPONSE_WIDTH)
    tool = draw(0, 5, rows, RESPONSE_WIDTH) == 0  # tokens inside the response that the policy did not produce
    columns = {
        name: torch.randn(rows, RESPONSE_WIDTH, generator=generator) for name in ("advantages", "returns", "noise")
    }
    attention = torch.cat(
        [
            torch.arange(PROMPT_WIDTH).flip(0) < prompts[:, None],
            torch.arange(RESPONSE_WIDTH) < responses[:, None],
        ],
        dim=1,
    ).long()
    mask = attention[:, PROMPT_WIDTH:] * ~tool
    attention = torch.nn.functional.pad(attention, (left, right))
    ids = torch.nn.functional.pad(ids, (left, right)) * attention
    columns = {name: torch.nn.functional.pad(column * mask, (0, right)) for name, column in columns.items()}
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, left + PROMPT_WIDTH :],
        "response_mask": torch.nn.functional.pad(mask, (0, right)),
        **columns,
    }


def worker_batch(padded: dict[str, torch.Tensor], mini_batches: int = 2, **settings: Any) -> TensorDict:
    """What the driver sends: jagged rows, row i in mini-batch i modulo `mini_batches`, denominators over all rows."""
    td = left_right_2_no_padding(DataProto.from_dict(padded).to_tensordict())
    mini_batch = torch.arange(len(td)) % mini_batches
    tokens = padded["response_mask"].sum(1)
    td["mini_batch"] = mini_batch
    return tu.assign_non_tensor(
        td,
        temperature=0.7,
        global_steps=1,
        mini_batch_num_tokens=[float(tokens[mini_batch == k].sum()) for k in range(mini_batches)],
        mini_batch_num_seqs=[float((tokens[mini_batch == k] > 0).sum()) for k in range(mini_batches)],
        **settings,
    )


def new_actor(cfg: Any, role: str = "actor_rollout_ref", steps: int = 100) -> ActorRolloutRefWorker:
    worker = ActorRolloutRefWorker(
        cfg.actor_rollout_ref,
        role,
        total_optimizer_steps=steps,
        rollout_correction=cfg.algorithm.rollout_correction,
    )
    worker.init_model()
    return worker


def new_critic(cfg: Any, steps: int = 100) -> CriticWorker:
    worker = CriticWorker(cfg.critic, total_optimizer_steps=steps)
    worker.init_model()
    return worker


def shard(td: TensorDict, rank: int, world_size: int) -> TensorDict:
    """A rank's contiguous share of the rows."""
    return tu.chunk_tensordict(td, world_size)[rank]


class Gradients:
    """Takes the place of the optimizer: records what the engine would have stepped along."""

    param_groups: list[Any] = []

    def __init__(self, engine: Any) -> None:
        self.engine, self.seen = engine, []
        engine.optimizer = self

    def step(self) -> None:
        self.seen.append(torch.cat([local_tensor(p.grad).flatten() for p in self.engine.module.parameters()]))

    def zero_grad(self, set_to_none: bool) -> None:
        self.engine.module.zero_grad(set_to_none=set_to_none)


def padded(column: torch.Tensor, td: TensorDict) -> torch.Tensor:
    return no_padding_2_padding(column, td)


# ------------------------------------------------------------------------------------------------------------ ranks


def run_ranks(function: Any, world_size: int, *args: Any) -> list[Any]:
    """`function(rank, world_size, *args)` in as many processes joined by gloo; their results in rank order.

    A server that has imported everything forks the ranks, so they start in a fraction of a second and share nothing
    with the process group of this one. `function` must live in an importable module.
    """
    context = get_context("forkserver")
    _start_server()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(there, function, rank, world_size, port, args), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    results: dict[int, Any] = {}
    while len(results) < world_size:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=90)
        assert ready, f"no answer from {function.__name__}"
        for pipe in ready:
            rank = pipes.index(pipe)
            ok, results[rank] = pickle.loads(pipe.recv_bytes())
            if not ok:
                for process in processes:
                    process.kill()
                raise AssertionError(f"rank {rank}:\n{results[rank]}")
    for process in processes:
        process.join(20)
    return [results[rank] for rank in range(world_size)]


@cache
def _start_server() -> None:
    forkserver.set_forkserver_preload(["workers_preload"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server does not look where this process does
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _rank(pipe: Any, function: Any, rank: int, world_size: int, port: int, args: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(80, exit=True)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        pipe.send_bytes(pickle.dumps((True, function(rank, world_size, *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
