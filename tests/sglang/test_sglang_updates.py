from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout_testing import generate_all, log_probs_of, prompts_of, requests_of, run
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_lib.errors import EngineAsleepError, RolloutError, StaleWeightsError
from ppo_lib.rollout.engine import TokenOutput
from ppo_lib.rollout.sglang.engine import SGLangEngine
from ppo_lib.rollout.weights import NamedTensor, WeightBucket, buckets

PROMPTS = prompts_of([4, 19, 9])


async def send(engine: SGLangEngine, tensors: Iterable[NamedTensor], version: int, bucket_bytes: int = 40_000) -> None:
    await engine.begin_update()
    for bucket in buckets(tensors, bucket_bytes):
        await engine.update_bucket(bucket)
    await engine.finish_update(version)


def changed(model_dir: str, seed: int) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return model


def check(model: PreTrainedModel, outputs: list[TokenOutput], version: int) -> None:
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = log_probs_of(model, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=5e-5, rtol=0)
        assert (output.weight_version_min, output.weight_version_max) == (version, version)


def ask(engine: SGLangEngine, **kwargs: int) -> list[TokenOutput]:
    return run(generate_all(engine, requests_of(PROMPTS, max_tokens=12), **kwargs))


@pytest.fixture(scope="module")
def engine(model_dirs: dict[str, str], shared_engine: Callable[[str], SGLangEngine]) -> Iterable[SGLangEngine]:
    """The shared engine, with the weights of its model put back at the end."""
    engine = shared_engine("qwen2")
    yield engine
    run(engine.wake_up())
    run(send(engine, AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"]).named_parameters(), 1000))


def test_weights_arrive_in_buckets_and_every_answer_names_their_version(engine, model_dirs):
    for version in range(3):
        model = changed(model_dirs["qwen2"], version)
        run(send(engine, model.named_parameters(), version))
        check(model, ask(engine, min_weight_version=version), version)


def test_weights_survive_sleep_and_come_in_between_the_two_stages_of_waking(engine, model_dirs):
    model = changed(model_dirs["qwen2"], 10)
    run(send(engine, model.named_parameters(), 10))
    run(engine.sleep())
    with pytest.raises(EngineAsleepError, match="kv_cache, weights"):
        ask(engine)
    with pytest.raises(EngineAsleepError, match="wake the tag weights first"):
        run(engine.begin_update())
    run(engine.wake_up())
    check(model, ask(engine), 10)

    run(engine.sleep())
    run(engine.sleep(["weights"]))  # as it does already
    run(engine.wake_up(["weights"]))
    model = changed(model_dirs["qwen2"], 11)
    run(send(engine, model.named_parameters(), 11))
    with pytest.raises(EngineAsleepError, match="kv_cache"):
        ask(engine)
    run(engine.wake_up(["kv_cache"]))
    check(model, ask(engine), 11)
    with pytest.raises(RolloutError, match="unknown sleep tag 'cache'"):
        run(engine.sleep(["cache"]))


def test_a_tied_weight_may_come_under_both_names(engine, model_dirs):
    model = changed(model_dirs["qwen2"], 20)
    run(send(engine, [*model.named_parameters(), ("lm_head.weight", model.lm_head.weight)], 20))
    check(model, ask(engine), 20)


def test_a_request_under_way_is_continued_with_the_new_weights(engine, model_dirs):
    model = changed(model_dirs["qwen2"], 30)
    run(send(engine, changed(model_dirs["qwen2"], 29).named_parameters(), 29))
    (request,) = requests_of(PROMPTS[:1], max_tokens=80, ignore_eos=True)

    async def update_over_it() -> TokenOutput:
        answer = asyncio.create_task(engine.generate(request))
        while not (await engine.status()).running:
            await asyncio.sleep(0.001)
        await send(engine, model.named_parameters(), 30)
        return await answer

    output = run(update_over_it())
    assert len(output.token_ids) == len(output.log_probs) == 80
    assert (output.weight_version_min, output.weight_version_max) == (29, 30)
    expected = log_probs_of(model, PROMPTS[0], output.token_ids)
    assert (expected[-1] - output.log_probs[-1]).abs() < 5e-5


def _unknown(tensors: list[NamedTensor]) -> list[NamedTensor]:
    return [*tensors, ("model.nrom.weight", tensors[0][1])]


def _missing(tensors: list[NamedTensor]) -> list[NamedTensor]:
    return tensors[:-1]


def _misshapen(tensors: list[NamedTensor]) -> list[NamedTensor]:
    return [(name, tensor[:-1]) if name == "model.norm.weight" else (name, tensor) for name, tensor in tensors]


def _twice(tensors: list[NamedTensor]) -> list[NamedTensor]:
    return [*tensors, tensors[1]]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_unknown, r"a tensor model.nrom.weight that the engine's model does not have; near names: model.norm.weight"),
        (_missing, r"left out 1 of \d+ parameters: model.norm.weight"),
        (_misshapen, r"model.norm.weight with shape \(63,\); the engine's model has \(64,\)"),
        (_twice, "twice"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_and_the_engine_does_not_serve_until_the_next(
    engine, model_dirs, fault, message
):
    model = changed(model_dirs["qwen2"], 40)
    with pytest.raises(RolloutError, match=message):
        run(send(engine, fault(list(model.named_parameters())), 40))
    with pytest.raises(StaleWeightsError, match="its last weight update failed"):
        ask(engine)
    run(send(engine, model.named_parameters(), 41))
    check(model, ask(engine), 41)


def test_a_damaged_bucket_is_found_inside_the_engine(engine, model_dirs):
    model = changed(model_dirs["qwen2"], 50)
    bucket = WeightBucket.pack(model.named_parameters())
    data = np.array(bucket.data)
    data[1234] ^= 1

    async def send_damaged() -> None:
        await engine.begin_update()
        await engine.update_bucket(replace(bucket, data=data))

    with pytest.raises(RolloutError, match="arrived damaged: its checksum differs"):
        run(send_damaged())
    run(send(engine, model.named_parameters(), 51))
    check(model, ask(engine), 51)


def test_weights_that_the_engine_dropped_are_missed_in_the_sum(engine, model_dirs):
    """A name that passes our count and that SGLang's own loader skips without a word."""
    model = changed(model_dirs["qwen2"], 60)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"  # its loader skips every name like this
    outline = engine._outline
    outline.model.layers[0].self_attn.rotary_emb = torch.nn.Module()
    outline.model.layers[0].self_attn.rotary_emb.inv_freq = torch.nn.Parameter(torch.ones(4, device="meta"))
    try:
        with pytest.raises(RolloutError, match="do not add up to those that were sent"):
            run(send(engine, [*model.named_parameters(), (name, torch.ones(4))], 60))
    finally:
        del outline.model.layers[0].self_attn.rotary_emb
    run(send(engine, model.named_parameters(), 61))
    check(model, ask(engine), 61)


def test_an_update_that_was_not_begun_or_not_finished_is_told(engine, model_dirs):
    model = changed(model_dirs["qwen2"], 70)
    with pytest.raises(RolloutError, match="without a begin_update"):
        run(engine.finish_update(70))
    run(engine.begin_update())
    run(engine.begin_update())  # whoever gave up an update begins anew
    run(send(engine, model.named_parameters(), 71))
    check(model, ask(engine), 71)
