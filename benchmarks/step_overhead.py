"""What a step costs beside the models: the driver, Ray, and what a second rank saves.

1. The driver's own share. 1024 rows of 2048 tokens whose responses were recorded: all that the driver does in a step
   runs as it is (collating, joining, balancing, scores, jagged rows and the bytes of every rank's shard, advantages,
   metrics); only the model passes are answered from memory, with numbers of the right shape. Its CPU-seconds stand
   beside the seconds that the passes would take here, from the rate that part 2 measures, and beside a minute.
2. Step time against tokens: log-prob pass and update of a 3.2M Llama for 32 to 256 rows, and the straight line
   through them.
3. Ray against local, and two ranks against one: the step of grpo_step.py (old log-probs recomputed), wall time, one
   thread a rank, the fastest of each stage in three rounds. Needs two cores of its own.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py [--quick] [--part 1|2|3]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from common import in_own_process, machine, print_table, save_model, write_prompts
from grpo_step import MODEL, PROMPTS, overrides, score
from tensordict import TensorDict

from protocol import jagged
from protocol import tensordict_utils as tu

ROWS, WIDTH, N_ROLLOUTS = 1024, 2048, 8


# ------------------------------------------------------------------------------------------------ the driver's share


class RecordedWorkers:
    """Stands where a worker group stands, on `world_size` ranks, and answers from memory.

    Like a real group it splits the rows and makes the bytes that would travel to each rank.
    """

    world_size = 4

    def _columns(self, data: TensorDict, *names: str) -> TensorDict:
        self._send(data)
        values, offsets, _ = jagged.parts_of(data["response_mask"])
        column = jagged.from_parts(torch.full((len(values),), -1.0), offsets)
        return TensorDict(dict.fromkeys(names, column), batch_size=[len(data)])

    def _send(self, data: TensorDict) -> None:
        for shard in tu.chunk_tensordict(data, self.world_size):
            buffers: list[Any] = []
            pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
            b"".join(memoryview(buffer).cast("B") for buffer in buffers)

    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        return self._columns(data, "log_probs", "entropys")

    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict:
        return self._columns(data, "log_probs")

    def update_actor(self, data: TensorDict) -> dict[str, float]:
        self._send(data)
        return {"actor/pg_loss": 0.0}


class RecordedRollouts:
    """Generation that was done before: the samples are there, collating them is the driver's work."""

    def __init__(self, rows: int, prompt: int, response: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(response // 2, response + 1, (rows,), generator=generator).tolist()
        self.tokens = [torch.randint(4, 90, (length,), generator=generator).tolist() for length in lengths]
        self.response = response

    def generate_sequences(self, gen_batch: Any) -> Any:
        from ppo_lib.reward import RewardResult
        from ppo_lib.rollout.agent_loop.base import AgentLoopOutput
        from ppo_lib.rollout.agent_loop.collate import collate

        samples = [
            AgentLoopOutput(
                index=row,
                uid=gen_batch.non_tensor_batch["uid"][row],
                session=row % N_ROLLOUTS,
                response_ids=tokens,
                response_mask=[1] * len(tokens),
                log_probs=[-1.0] * len(tokens),
                num_turns=2,
                finish_reason="stop",
                weight_version_min=0,
                weight_version_max=0,
                reward=RewardResult(float(row % 3), {}),
            )
            for row, tokens in enumerate(self.tokens)
        ]
        return collate(samples, gen_batch, self.response, 0)


class Nothing:
    """Weight synchronisation that has nothing to do."""

    def sleep_replicas(self) -> None: ...

    def update_weights(self, global_steps: int) -> None: ...


def driver_seconds(rows: int, width: int, steps: int = 3) -> dict[str, float]:
    """CPU-seconds of the driver's stages, medians over steps."""
    from ppo_lib import RayPPOTrainer, load_config

    prompt = width // 4
    stages: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        save_model("tiny", folder / "model")
        write_prompts(folder / "data.jsonl", rows // N_ROLLOUTS * (steps + 1), prompt)
        config = [
            *overrides(folder, "float32", "always", False, None),
            f"data.train_batch_size={rows // N_ROLLOUTS}",
            f"data.max_prompt_length={prompt}",
            f"data.max_response_length={width - prompt}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={rows // N_ROLLOUTS // 4}",
            "actor_rollout_ref.actor.use_kl_loss=true",
        ]
        trainer = RayPPOTrainer(load_config(overrides=config), reward_fn=score)
        trainer.actor_rollout_wg = trainer.ref_policy_wg = RecordedWorkers()
        trainer.critic_wg, trainer.checkpoint_manager = None, Nothing()
        trainer.async_rollout_manager = RecordedRollouts(rows, prompt, width - prompt)
        for batch_dict in trainer.train_dataloader:
            began = last = time.process_time()
            for stage, _, _ in trainer.step_through(batch_dict):
                now = time.process_time()
                stages.setdefault(stage, []).append(now - last)
                last = now
            stages.setdefault("metrics", []).append(time.process_time() - last)
            stages.setdefault("step", []).append(time.process_time() - began)
    return {stage: median(values[1:]) for stage, values in stages.items()}


# --------------------------------------------------------------------------------------------------- a straight line


def training_seconds(rows: int, folder: Path) -> tuple[int, float]:
    """Tokens of so many rows, and CPU-seconds of their log-prob pass and update; the least of three."""
    from ppo_lib import load_config
    from ppo_lib.workers import ActorRolloutRefWorker
    from protocol import DataProto
    from protocol.no_padding import left_right_2_no_padding

    config = load_config(overrides=overrides(folder, "float32", "always", False, None)).actor_rollout_ref
    worker = ActorRolloutRefWorker(config, "actor_rollout")
    worker.init_model()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 90, (rows, 88), generator=generator)
    ids[:, :24] = ids[::8, :24].repeat_interleave(8, 0)
    ones = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(1) - 1}
    columns |= {"responses": ids[:, 24:], "response_mask": ones[:, 24:], "advantages": torch.randn(rows, 64)}
    td = left_right_2_no_padding(DataProto.from_dict(columns).to_tensordict())
    td["mini_batch"] = torch.zeros(rows, dtype=torch.int64)
    settings = {"mini_batch_num_tokens": [rows * 64.0], "mini_batch_num_seqs": [float(rows)]}
    tu.assign_non_tensor(td, temperature=1.0, global_steps=1, calculate_entropy=True, **settings)
    times = []
    for _ in range(4):
        began = time.process_time()
        td["old_log_probs"] = worker.compute_log_prob(td)["log_probs"]
        worker.update_actor(td)
        times.append(time.process_time() - began)
    return rows * 88, min(times[1:])


def straight_line(counts: list[int]) -> float:
    """Print step time against tokens; returns seconds per token."""
    from ppo_lib.single_controller.host import free_port

    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in alone.items()})
    with tempfile.TemporaryDirectory() as work:
        save_model(MODEL, Path(work) / "model")
        write_prompts(Path(work) / "data.jsonl", PROMPTS, 24)
        points = [training_seconds(rows, Path(work)) for rows in counts]
    tokens, seconds = (torch.tensor(values, dtype=torch.float64) for values in zip(*points))
    design = torch.stack([torch.ones_like(tokens), tokens], dim=1)
    start, slope = torch.linalg.lstsq(design, seconds[:, None]).solution.flatten().tolist()
    rows = [
        [f"{int(t)}", s, s / t * 1e6, f"{s / (start + slope * t) - 1:+.1%}"]
        for t, s in zip(tokens.tolist(), seconds.tolist())
    ]
    print_table("Log-prob pass and update, 3.2M Llama, fp32", ["tokens", "CPU-s", "us a token", "off the line"], rows)
    print(f"line: {start * 1e3:.1f} ms + {slope * 1e6:.1f} us a token")
    return slope


# -------------------------------------------------------------------------------------------------- groups and ranks


def wall_seconds(group: str, ranks: int, steps: int) -> dict[str, float]:
    """`timing_s/...` of a step, the fastest of each after two steps that warm up."""
    import ppo_lib.trainer.ray_trainer as spine
    from ppo_lib import load_config

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        save_model(MODEL, folder / "model")
        write_prompts(folder / "data.jsonl", (steps + 2) * PROMPTS, 24)
        config = [
            *overrides(folder, "float32", "always", False, None),
            f"trainer.worker_group={group}",
            f"trainer.n_gpus_per_node={ranks}",
        ]
        trainer = spine.RayPPOTrainer(load_config(overrides=config), reward_fn=score)
        seen: list[dict[str, float]] = []
        try:
            trainer.init_workers()
            trainer.checkpoint_manager.update_weights(0)
            for batch_dict in trainer.train_dataloader:
                metrics: dict[str, float] = {}
                for _, _, metrics in trainer.step_through(batch_dict):  # noqa: B007
                    pass
                seen.append({k.removeprefix("timing_s/"): v for k, v in metrics.items() if k.startswith("timing_s/")})
        finally:
            trainer.close()
    return {stage: min(step[stage] for step in seen[2:]) for stage in seen[-1]}


def groups_and_ranks(steps: int, rounds: int) -> None:
    """The cases in turn, several times over, so that a busier minute of the machine falls on all of them."""
    cases = [("local", 1), ("ray", 1), ("ray", 2)]
    runs = [
        [json.loads(in_own_process(["--wall", group, str(ranks), str(steps)])) for group, ranks in cases]
        for _ in range(rounds)
    ]
    took = [{stage: min(run[stage] for run in of_case) for stage in of_case[0]} for of_case in zip(*runs)]
    training = [result["old_log_prob"] + result["update_actor"] for result in took]
    rows = [
        [f"{group}, {ranks} rank(s)", result["step"], result["step"] / took[0]["step"], result["gen"], *stages]
        for (group, ranks), result, stages in zip(cases, took, [(own, own / training[1]) for own in training])
    ]
    header = ["group", "step s", "of local", "gen s", "training stages s", "of one rank"]
    print_table("Wall time of a step (targets: Ray 1.05 of local, two ranks 0.65 of one)", header, rows)


def driver_share(rows: int, width: int, seconds_per_token: float) -> None:
    stages = driver_seconds(rows, width)
    table = [[stage, seconds] for stage, seconds in stages.items()]
    print_table(f"The driver's own CPU-seconds, {rows} rows x {width} tokens", ["stage", "CPU-s"], table)
    passes = rows * width * 0.8 * seconds_per_token  # as the recorded rows are, four fifths of the width on average
    for what, whole in (("this machine's passes of a 3.2M model", passes), ("a minute on GPUs", 60.0)):
        share = stages["step"] / (stages["step"] + whole)
        print(f"share of a step with {whole:.0f} s of passes ({what}): {share:.1%} (target 5%)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small numbers, no Ray")
    parser.add_argument("--part", type=int, choices=(1, 2, 3), help="only this part")
    parser.add_argument("--wall", nargs=3, metavar=("GROUP", "RANKS", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.wall:
        group, ranks, steps = options.wall
        print(json.dumps(wall_seconds(group, int(ranks), int(steps))))
        return
    print(machine())
    if options.part in (None, 1, 2):
        slope = straight_line([8, 16] if options.quick else [32, 64, 128, 256])
        if options.part != 2:
            driver_share(*((64, 256) if options.quick else (ROWS, WIDTH)), slope)
    if options.part in (None, 3) and not options.quick:
        groups_and_ranks(steps=4, rounds=3)


if __name__ == "__main__":
    main()
