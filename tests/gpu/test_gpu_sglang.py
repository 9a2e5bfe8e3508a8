"""What only a GPU can show of the sglang engine: device buckets, the memory saver, CUDA graphs, tensor parallelism.

Written without a GPU at hand; `tests/gpu/run_on_gpu.py` runs all of this and prints a table.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
torch = pytest.importorskip("torch")
from rollout_testing import generate_all, log_probs_of, ppo_config, prompts_of, requests_of, run  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config  # noqa: E402

from ppo_lib.rollout.sglang.versions import is_installed  # noqa: E402
from ppo_lib.rollout.weights import buckets  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not is_installed(), reason="needs sglang: pip install 'ppo_lib[sglang]'"),
]
PROMPTS = prompts_of([4, 19, 33, 60])
BF16 = 0.05  # of a log-prob, between two implementations in bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 60M parameters with heads of a size that every attention kernel takes."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("qwen2")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def model(folder: str) -> Iterator[PreTrainedModel]:
    """The reference, on the GPU."""
    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().cuda()
    torch.cuda.empty_cache()


def engine_of(folder: str, **rollout: object):
    from ppo_lib.rollout.sglang.engine import SGLangEngine

    settings = {
        "name": "sglang",
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.3,
        "prompt_length": 128,
        "response_length": 128,
        **rollout,
    }
    return SGLangEngine(ppo_config(folder, **settings).actor_rollout_ref, folder, None, "cuda")


def memory_used() -> int:
    """Of GPU 0 by all processes, MiB."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def check(model: PreTrainedModel, outputs: list) -> None:
    cpu = model.float().cpu()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = log_probs_of(cpu, prompt, output.token_ids)
        assert (torch.tensor(output.log_probs) - expected).abs().mean() < BF16


async def send(engine, model: PreTrainedModel, version: int, on_gpu: bool) -> None:
    await engine.begin_update()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
    for bucket in buckets(model.named_parameters(), 16 << 20, device):
        await engine.update_bucket(bucket.share() if on_gpu else bucket)
    await engine.finish_update(version)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "cuda-graphs"])
def test_log_probs_with_and_without_cuda_graphs(folder, model, eager):
    engine = engine_of(folder, enforce_eager=eager)
    try:
        check(model, run(generate_all(engine, requests_of(PROMPTS, max_tokens=32)), 120))
    finally:
        asyncio.run(engine.shutdown())


def test_buckets_go_over_by_handles_of_device_memory_and_are_counted_in_the_engine(folder, model):
    engine = engine_of(folder, load_format="dummy")
    try:
        for version in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            run(send(engine, model, version, on_gpu=True), 120)
            outputs = run(generate_all(engine, requests_of(PROMPTS, max_tokens=32), min_weight_version=version), 120)
            assert {output.weight_version_max for output in outputs} == {version}
        check(model, outputs)
    finally:
        asyncio.run(engine.shutdown())


def test_a_sleeping_engine_gives_its_memory_back_in_two_stages(folder, model):
    engine = engine_of(folder, load_format="dummy", gpu_memory_utilization=0.5)
    try:
        run(send(engine, model, 0, on_gpu=True), 120)
        awake = memory_used()
        run(engine.sleep(), 60)
        asleep = memory_used()
        run(engine.wake_up(["weights"]), 60)
        with_weights = memory_used()
        run(send(engine, model, 1, on_gpu=True), 120)
        run(engine.wake_up(["kv_cache"]), 60)
        check(model, run(generate_all(engine, requests_of(PROMPTS, max_tokens=16)), 120))
        print(f"MiB used: awake {awake}, asleep {asleep}, weights only {with_weights}")
        assert asleep < awake / 2
        assert asleep <= with_weights < awake
    finally:
        asyncio.run(engine.shutdown())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_replica_over_two_gpus_takes_a_part_from_each(folder, model):
    engine = engine_of(folder, load_format="dummy", tensor_model_parallel_size=2)
    copies = [model.to(f"cuda:{gpu}") if gpu == 0 else AutoModelForCausalLM.from_pretrained(folder) for gpu in range(2)]
    copies[1] = copies[1].to(device="cuda:1", dtype=torch.bfloat16)

    async def send_from_both() -> None:
        await engine.begin_update()
        streams = [buckets(copy.named_parameters(), 16 << 20, copy.device) for copy in copies]
        for pair in zip(*streams, strict=True):
            shared = [bucket.share() for bucket in pair]
            await asyncio.gather(*(engine.update_bucket(one, part, 2) for part, one in enumerate(shared)))
        await engine.finish_update(0)

    try:
        run(send_from_both(), 120)
        check(model, run(generate_all(engine, requests_of(PROMPTS, max_tokens=32)), 120))
    finally:
        asyncio.run(engine.shutdown())


def test_deterministic_mode_repeats_a_batch_bit_for_bit(folder):
    engine = engine_of(folder, **{"engine_kwargs.sglang.enable_deterministic_inference": True})
    try:
        first, again = (run(generate_all(engine, requests_of(PROMPTS, max_tokens=64)), 120) for _ in range(2))
        alone = [run(generate_all(engine, [request]), 120)[0] for request in requests_of(PROMPTS, max_tokens=64)]
        assert [(o.token_ids, o.log_probs) for o in first] == [(o.token_ids, o.log_probs) for o in again]
        assert [o.token_ids for o in first] == [o.token_ids for o in alone]
    finally:
        asyncio.run(engine.shutdown())


def test_the_trainer_runs_with_trainer_and_engine_on_one_gpu(folder, tmp_path):
    from ppo_lib import RayPPOTrainer, load_config

    sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
    from runs import GRPO, TINY, metrics_of

    overrides = [
        *TINY,
        *GRPO,
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        "trainer.device=cuda",
        "trainer.worker_group=ray",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir={tmp_path}",
    ]
    trainer = RayPPOTrainer(load_config(overrides=overrides))
    begin = time.monotonic()
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.close()
    print(f"three steps in {time.monotonic() - begin:.0f} s")
    assert all(line["training/rollout_probs_diff_mean"] < 0.03 for line in metrics_of(tmp_path))
