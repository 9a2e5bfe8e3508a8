from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from rollout_testing import VOCAB, generate_all, log_probs_of, prompts_of, requests_of, run, scores_of
from transformers import PreTrainedModel

from ppo_lib.errors import RolloutError, StaleWeightsError
from ppo_lib.rollout.engine import GenerationRequest, SamplingParams, TokenOutput
from ppo_lib.rollout.sglang.engine import SGLangEngine

Engines = Callable[[str], SGLangEngine]
Models = dict[str, PreTrainedModel]
PROMPTS = prompts_of([1, 5, 9, 17, 30, 2, 40, 60])
FAMILIES = ("llama", "qwen2", "qwen3")


def generate(engine: SGLangEngine, prompts: list[list[int]] = PROMPTS, **params: object) -> list[TokenOutput]:
    return run(generate_all(engine, requests_of(prompts, **params)))


def worst_log_prob(model: PreTrainedModel, outputs: list[TokenOutput], temperature: float) -> float:
    worst = 0.0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = log_probs_of(model, prompt, output.token_ids, temperature)
        worst = max(worst, (expected - torch.tensor(output.log_probs)).abs().max().item())
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(shared_engine: Engines, models: Models, family: str):
    outputs = generate(shared_engine(family), temperature=0.0, max_tokens=24)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = models[family].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert output.token_ids == expected[0, len(prompt) :].tolist()
    assert worst_log_prob(models[family], outputs, 1.0) < 5e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("temperature", "limit"), [(1.0, 5e-5), (0.7, 1e-4)])
def test_log_probs_are_those_a_trainer_recomputes(
    shared_engine: Engines, models: Models, family: str, temperature: float, limit: float
):
    outputs = generate(shared_engine(family), temperature=temperature, max_tokens=24)
    assert worst_log_prob(models[family], outputs, temperature) < limit
    assert len({tuple(output.token_ids) for output in outputs}) == len(PROMPTS)


@pytest.mark.parametrize("narrowed", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 5, "top_p": 0.8}])
def test_narrowed_sampling_keeps_to_the_likeliest_and_reports_the_whole_distribution(
    shared_engine: Engines, models: Models, narrowed: dict[str, float]
):
    outputs = generate(shared_engine("llama"), temperature=0.7, max_tokens=16, **narrowed)
    assert worst_log_prob(models["llama"], outputs, 0.7) < 1e-4
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        probs = (scores_of(models["llama"], prompt, output.token_ids) / 0.7).softmax(-1)
        for at, token in enumerate(output.token_ids):
            likelier = probs[at][probs[at] > probs[at, token]]
            assert len(likelier) < narrowed.get("top_k", VOCAB)
            assert likelier.sum() <= narrowed.get("top_p", 1.0) + 1e-5


def test_greedy_at_a_temperature_has_log_probs_at_it(shared_engine: Engines, models: Models):
    engine = shared_engine("llama")
    plain = generate(engine, temperature=0.0, max_tokens=16)
    scaled = generate(engine, temperature=0.7, greedy=True, max_tokens=16)
    assert [o.token_ids for o in scaled] == [o.token_ids for o in plain]
    assert worst_log_prob(models["llama"], scaled, 0.7) < 1e-4


def test_a_stop_token_ends_the_response_and_stays_in_it(shared_engine: Engines):
    engine = shared_engine("llama")
    whole = generate(engine, temperature=0.0, max_tokens=20)
    at = 6
    stop = whole[3].token_ids[at]
    cut = generate(engine, temperature=0.0, max_tokens=20, stop_token_ids=(stop,))[3]
    first = whole[3].token_ids.index(stop)
    assert cut.token_ids == whole[3].token_ids[: first + 1]
    assert cut.finish_reason == "stop"
    assert whole[3].finish_reason == "length"


def test_ignore_eos_goes_on_past_the_end_token(shared_engine: Engines):
    outputs = generate(shared_engine("llama"), temperature=1.5, max_tokens=30, ignore_eos=True)
    assert [len(output.token_ids) for output in outputs] == [30] * len(PROMPTS)
    with pytest.raises(RolloutError, match="ignore_eos and stops of its own"):
        generate(shared_engine("llama"), ignore_eos=True, stop_token_ids=(5,))


def test_tokens_are_clipped_to_what_fits_and_log_probs_may_be_left_out(shared_engine: Engines):
    (output,) = generate(
        shared_engine("llama"), prompts_of([90]), max_tokens=500, ignore_eos=True, temperature=1.0, logprobs=False
    )
    assert len(output.token_ids) == 6  # of the 64 + 32 positions
    assert output.finish_reason == "length"
    assert output.log_probs is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest("r", [5] * 96), "a prompt of 96 tokens; at most 95 leave room"),
        (GenerationRequest("r", []), "an empty prompt"),
        (GenerationRequest("r", [VOCAB]), f"the model's vocabulary is 0 to {VOCAB - 1}"),
        (GenerationRequest("r", [5], SamplingParams(stop=("x",))), "runs without a tokenizer; set rollout.stop"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(shared_engine: Engines, request_: GenerationRequest, message: str):
    with pytest.raises(RolloutError, match=message):
        run(shared_engine("llama").generate(request_))


def test_weights_older_than_asked_for_are_refused(shared_engine: Engines):
    with pytest.raises(StaleWeightsError, match="holds weight version -1; request r0 asks for 3"):
        run(generate_all(shared_engine("llama"), requests_of(PROMPTS[:1]), min_weight_version=3))


def test_flushing_the_prefix_cache_changes_no_answer(shared_engine: Engines):
    engine = shared_engine("llama")
    first = generate(engine, temperature=0.0, max_tokens=8)
    run(engine.flush())
    assert [o.token_ids for o in generate(engine, temperature=0.0, max_tokens=8)] == [o.token_ids for o in first]


def test_abort_returns_what_there_is(shared_engine: Engines):
    engine = shared_engine("llama")
    requests = requests_of(prompts_of([3, 4, 5]), max_tokens=90, ignore_eos=True)

    async def abort_one_then_all() -> tuple[int, int, list[TokenOutput]]:
        running = asyncio.gather(*(engine.generate(request) for request in requests))
        while (await engine.status()).running < 3:
            await asyncio.sleep(0.001)
        one = await engine.abort(["r1"])
        rest = await engine.abort()
        return one, rest, await running

    one, rest, outputs = run(abort_one_then_all())
    assert (one, rest) == (1, 2)
    assert [output.finish_reason for output in outputs] == ["abort"] * 3
    assert all(len(output.token_ids) == len(output.log_probs) < 90 for output in outputs)
    assert run(engine.status()).running == 0
