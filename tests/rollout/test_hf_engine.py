from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace

import pytest
import torch
from rollout_testing import (
    VOCAB,
    generate_all,
    log_probs_of,
    prompts_of,
    requests_of,
    rollout_config,
    run,
    scores_of,
)

from ppo_lib.errors import EngineAsleepError, RolloutError, StaleWeightsError
from ppo_lib.models import dtypes, load_tokenizer, resolve_model_path
from ppo_lib.rollout.engine import Cohort, GenerationRequest, SamplingParams
from ppo_lib.rollout.hf_engine import HFEngine

FAMILIES = ["llama", "qwen2-sliding", "qwen3"]
LENGTHS = [3, 17, 9, 30, 1, 12]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_num_seqs", [2, 256])
def test_greedy_equals_generate_on_rows_of_different_lengths(family, max_num_seqs, make_engine, reference_models):
    model = reference_models[family]
    prompts = prompts_of(LENGTHS)
    outputs = run(
        generate_all(make_engine(family, max_num_seqs=max_num_seqs), requests_of(prompts, greedy=True, max_tokens=24))
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=24
        )[0, len(prompt) :].tolist()
        if output.token_ids != expected:
            at = next(i for i, (a, b) in enumerate(zip(output.token_ids, expected, strict=False)) if a != b)
            best = scores_of(model, prompt, expected[: at + 1])[-1].log_softmax(-1).topk(2).values
            assert best[0] - best[1] < 1e-5
        assert output.finish_reason == ("stop" if output.token_ids[-1] == 2 else "length")


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_temperature_scaled_distribution(family, make_engine, reference_models):
    prompts = prompts_of(LENGTHS)
    for params in ({"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5, "top_p": 0.9}):
        outputs = run(generate_all(make_engine(family), requests_of(prompts, max_tokens=20, **params)))
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = log_probs_of(reference_models[family], prompt, output.token_ids, params["temperature"])
            torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-4, rtol=0)


def test_greedy_at_temperature_zero_has_log_probs_at_temperature_one(make_engine, reference_models):
    (prompt,) = prompts_of([8])
    (output,) = run(generate_all(make_engine(), requests_of([prompt], temperature=0, max_tokens=8)))
    expected = log_probs_of(reference_models["llama"], prompt, output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-4, rtol=0)


def test_rows_of_one_group_differ_and_seeds_repeat(make_engine):
    prompt = prompts_of([8])[0]
    requests = requests_of([prompt] * 8, max_tokens=12)
    first = run(generate_all(make_engine(), requests))
    assert len({tuple(output.token_ids) for output in first}) == 8
    assert run(generate_all(make_engine(), requests)) == first
    same_seed = run(generate_all(make_engine(), [replace(r, params=replace(r.params, seed=5)) for r in requests]))
    assert len({tuple(output.token_ids) for output in same_seed}) == 1


def test_a_seed_draws_the_same_tokens_in_other_company(make_engine):
    prompts = prompts_of(LENGTHS)
    engine = make_engine()
    together = run(generate_all(engine, requests_of(prompts, max_tokens=12)))
    for request, output in zip(requests_of(prompts, max_tokens=12), together, strict=True):
        assert run(engine.generate(request)).token_ids == output.token_ids


@pytest.mark.parametrize("max_num_seqs", [3, 64])
def test_a_cohort_gives_the_same_bits_whatever_the_arrival_times(max_num_seqs, make_engine):
    prompts = [prompt for prompt in prompts_of([5, 20, 11]) for _ in range(4)]

    async def with_delays(engine: HFEngine, seed: int, batch: str) -> list:
        chance = random.Random(seed)

        async def one(request: GenerationRequest):
            await asyncio.sleep(chance.random() * 0.05)
            return await engine.generate(request)

        cohort = Cohort(batch, len(prompts))
        requests = [
            replace(r, cohort=cohort, params=replace(r.params, max_tokens=5 + i % 4 * 5))
            for i, r in enumerate(requests_of(prompts))
        ]
        arriving = list(enumerate(requests))
        chance.shuffle(arriving)
        outputs = await asyncio.gather(*(one(request) for _, request in arriving))
        return [output for _, output in sorted(zip((i for i, _ in arriving), outputs, strict=True))]

    engine = make_engine(max_num_seqs=max_num_seqs)
    first = run(with_delays(engine, 0, "a"))
    assert all(run(with_delays(engine, seed, f"b{seed}")) == first for seed in range(1, 4))
    assert run(with_delays(make_engine(max_num_seqs=max_num_seqs), 9, "c")) == first


def test_a_cohort_waits_for_its_last_request(make_engine):
    engine = make_engine()
    requests = [replace(r, cohort=Cohort("c", 2)) for r in requests_of(prompts_of([4, 6]), max_tokens=3)]

    async def scenario():
        first = asyncio.create_task(engine.generate(requests[0]))
        await asyncio.sleep(0.1)
        assert not first.done()
        assert (await engine.status()).waiting == 1
        second = await engine.generate(requests[1])
        return await first, second

    assert all(output.finish_reason in ("length", "stop") for output in run(scenario()))


def test_stop_token_and_end_token_stay_in_the_response_and_can_be_ignored(make_engine):
    engine = make_engine()
    (free,) = run(generate_all(engine, requests_of(prompts_of([6]), ignore_eos=True, max_tokens=20)))
    assert len(free.token_ids) == 20
    assert free.finish_reason == "length"
    stop = free.token_ids[4]
    expected = free.token_ids[: free.token_ids.index(stop) + 1]
    (output,) = run(generate_all(engine, requests_of(prompts_of([6]), stop_token_ids=(stop,), ignore_eos=True)))
    assert (output.token_ids, output.finish_reason) == (expected, "stop")


def test_a_stop_string_that_spans_tokens_ends_the_response_and_stays_in_it(make_engine):
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny-llama"))  # one character a token
    engine = make_engine(tokenizer=tokenizer)
    (free,) = run(generate_all(engine, requests_of(prompts_of([6]), ignore_eos=True, max_tokens=20)))
    stop = tokenizer.decode(free.token_ids[5:8])
    (output,) = run(generate_all(engine, requests_of(prompts_of([6]), stop=("nowhere", stop), ignore_eos=True)))
    assert output.token_ids == free.token_ids[:8]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_holds_half_the_bytes_where_the_cpu_computes_in_it(native, make_engine, monkeypatch, caplog):
    monkeypatch.setattr(dtypes, "cpu_computes_bfloat16", lambda: native)
    dtypes._say_float32.cache_clear()
    engine = make_engine(dtype="bfloat16")
    assert engine._model.dtype == (torch.bfloat16 if native else torch.float32)
    assert len([line for line in caplog.messages if "no bfloat16 arithmetic" in line]) == (0 if native else 1)
    (half,) = run(generate_all(engine, requests_of(prompts_of([6]), max_tokens=1)))
    (full,) = run(generate_all(make_engine(), requests_of(prompts_of([6]), max_tokens=1)))
    assert half.token_ids == full.token_ids
    assert half.log_probs == pytest.approx(full.log_probs, abs=0.1)


def test_on_a_cpu_linear_weights_lie_by_column_and_tied_ones_as_the_embedding_needs_them(make_engine):
    model = make_engine("qwen2-sliding")._model
    tied = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is tied
    assert tied.is_contiguous()
    layers = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    assert layers
    assert all(layer.weight.t().is_contiguous() for layer in layers)


def test_long_prompts_are_read_in_pieces_with_the_same_result(make_engine):
    prompts = prompts_of([40, 33, 2])
    whole = run(generate_all(make_engine(), requests_of(prompts, max_tokens=6)))
    pieces = run(generate_all(make_engine(max_num_batched_tokens=7), requests_of(prompts, max_tokens=6)))
    assert [o.token_ids for o in pieces] == [o.token_ids for o in whole]
    for a, b in zip(pieces, whole, strict=True):
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-5, rtol=0)


def test_responses_are_cut_at_the_context(make_engine):
    engine = make_engine(prompt_length=12, response_length=8)
    (output,) = run(generate_all(engine, requests_of(prompts_of([15]), ignore_eos=True)))
    assert len(output.token_ids) == 5
    with pytest.raises(RolloutError, match="at most 19 leave room"):
        run(generate_all(engine, requests_of(prompts_of([20]))))
    with pytest.raises(RolloutError, match="has 256 positions"):
        make_engine(max_model_len=300)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty prompt"),
        ([VOCAB], {}, "vocabulary is 0 to 95"),
        ([-1, 4], {}, "vocabulary is 0 to 95"),
        ([4], {"stop": ("x",)}, "no tokenizer"),
        (["4"], {}, "token ids that are no integers"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_harms_no_other(prompt, params, message, make_engine):
    engine = make_engine()

    async def scenario():
        bad = GenerationRequest("bad", prompt, SamplingParams(**params))
        return await asyncio.gather(
            engine.generate(bad),
            generate_all(engine, requests_of(prompts_of([5]), max_tokens=4)),
            return_exceptions=True,
        )

    refused, served = run(scenario())
    assert isinstance(refused, RolloutError)
    assert message in str(refused)
    assert len(served) == 1


@pytest.mark.parametrize(
    "params", [{"temperature": -1}, {"top_k": -2}, {"top_p": 0}, {"max_tokens": 0}, {"stop": "ab"}, {"stop": ("",)}]
)
def test_sampling_parameters_out_of_range_are_named(params):
    with pytest.raises(RolloutError, match=next(iter(params))):
        SamplingParams(**params)


def test_abort_returns_what_there_is(make_engine):
    engine = make_engine(prompt_length=100, response_length=156)

    async def scenario():
        requests = requests_of(prompts_of([5, 6]), ignore_eos=True, max_tokens=150)
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        while (await engine.status()).running < 2:
            await asyncio.sleep(0.001)
        assert await engine.abort(["r0"]) == 1
        assert await engine.abort(["nobody"]) == 0
        aborted, whole = await asyncio.gather(*tasks)
        assert aborted.finish_reason == "abort"
        assert len(aborted.token_ids) == len(aborted.log_probs) < 150
        assert (whole.finish_reason, len(whole.token_ids)) == ("length", 150)

    run(scenario())


def test_a_cancelled_caller_frees_its_place(make_engine):
    engine = make_engine(prompt_length=100, response_length=156)

    async def scenario():
        (request,) = requests_of(prompts_of([5]), ignore_eos=True, max_tokens=150)
        task = asyncio.create_task(engine.generate(request))
        while not (await engine.status()).running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        status = await engine.status()
        assert (status.running, status.waiting) == (0, 0)

    run(scenario())


def test_a_sleeping_engine_refuses_and_wakes_by_tag(make_engine):
    engine = make_engine()
    requests = requests_of(prompts_of([5]), max_tokens=4)
    before = run(generate_all(engine, requests))
    assert run(engine.status()).detail["cache_bytes"] > 0
    run(engine.sleep())
    status = run(engine.status())
    assert (status.state, status.detail["cache_bytes"]) == ("asleep", 0)
    with pytest.raises(EngineAsleepError, match="kv_cache, weights"):
        run(generate_all(engine, requests))
    run(engine.wake_up(["weights"]))
    with pytest.raises(EngineAsleepError, match="kv_cache"):
        run(generate_all(engine, requests))
    run(engine.wake_up(["kv_cache"]))
    assert run(generate_all(engine, requests)) == before
    with pytest.raises(RolloutError, match="unknown sleep tag 'wieghts'"):
        run(engine.sleep(["wieghts"]))


def test_sleep_is_refused_while_requests_run(make_engine):
    engine = make_engine(prompt_length=100, response_length=156)

    async def scenario():
        (request,) = requests_of(prompts_of([5]), ignore_eos=True, max_tokens=150)
        task = asyncio.create_task(engine.generate(request))
        while not (await engine.status()).running:
            await asyncio.sleep(0.001)
        with pytest.raises(RolloutError, match="holds 1 requests"):
            await engine.sleep()
        assert (await task).finish_reason == "length"

    run(scenario())


def test_an_engine_without_weights_refuses(make_engine):
    engine = make_engine(load_format="dummy")
    with pytest.raises(StaleWeightsError, match="not been sent any weights"):
        run(generate_all(engine, requests_of(prompts_of([5]))))


def test_building_an_engine_leaves_the_global_random_state_alone(make_engine):
    before = torch.get_rng_state()
    make_engine(load_format="dummy")
    make_engine(load_format="auto")
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_that_are_not_finite_fail_the_request_by_name(make_engine):
    engine = make_engine()
    with torch.no_grad():
        engine._model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RolloutError, match="request r0 are not finite at token 0"):
        run(generate_all(engine, requests_of(prompts_of([5]))))


def test_a_failing_step_fails_its_requests_and_the_engine_lives_on(make_engine):
    engine = make_engine()
    weight = engine._model.lm_head.weight
    good = weight.data
    weight.data = good[:, :3]  # the matrix product no longer fits
    with pytest.raises(RolloutError, match="decoding failed on r0"):
        run(generate_all(engine, requests_of(prompts_of([5]))))
    weight.data = good
    assert len(run(generate_all(engine, requests_of(prompts_of([5]), max_tokens=3)))) == 1


def test_shutdown_answers_everyone_and_ends_the_thread(make_engine):
    engine = make_engine(prompt_length=100, response_length=156)

    async def scenario():
        requests = requests_of(prompts_of([5, 6]), ignore_eos=True, max_tokens=150)
        waiting = replace(requests[1], cohort=Cohort("never", 2))
        tasks = [asyncio.create_task(engine.generate(request)) for request in (requests[0], waiting)]
        await asyncio.sleep(0.01)
        await engine.shutdown()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all("shut down" in str(result) for result in results)
        with pytest.raises(RolloutError, match="was shut down"):
            await engine.generate(requests[0])
        assert (await engine.status()).state == "stopped"

    run(scenario())
    assert not engine._thread.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name == "ppo_lib-hf-engine" and thread.is_alive()]


def test_layers_with_running_state_are_refused(tmp_path):
    from transformers import MambaConfig

    MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4).save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match="cannot decode mamba"):
        HFEngine(rollout_config(tmp_path, load_format="dummy"), str(tmp_path))
