from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout_testing import VOCAB, gen_batch_of, ppo_config, prompts_of

from ppo_lib.errors import BatchMismatchError, ConfigError, RewardError, RolloutError, WorkerTimeoutError
from ppo_lib.models import load_tokenizer, resolve_model_path
from ppo_lib.reward import RewardLoopManager, decode_response
from ppo_lib.rollout import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopOutput,
    LLMServerManager,
    register_agent_loop,
)
from ppo_lib.rollout.agent_loop import sample_seed
from protocol.schema import check_stage_output

PROMPTS = prompts_of([4, 19, 9])


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model_path("builtin:tiny-llama"))


@pytest.fixture
def make_manager(model_dirs, tokenizer):
    """Builds an agent loop manager over one replica in this process; ends everything after the test."""
    ends = []

    def make(compute_score=None, timeout_s=30.0, family="llama", **rollout):
        path = model_dirs[family]
        config = ppo_config(path, "reward.num_workers=0", **{"response_length": 12, **rollout})
        servers = LLMServerManager.create(
            config.actor_rollout_ref, path, tokenizer, "hf", "cpu", None, num_replicas=1, timeout_s=timeout_s
        )
        ends.append(servers.shutdown)
        reward = None
        if compute_score is not None:
            reward = RewardLoopManager(config.reward, tokenizer, compute_score)
            ends.append(reward.close)
        manager = AgentLoopManager(config, tokenizer, servers, reward)
        ends.append(manager.shutdown)
        return manager

    yield make
    for end in reversed(ends):
        end()
        end()  # ending twice is allowed
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("ppo_lib-hf", "ppo_lib-agent"))]


def _length_score(data_source, solution_str, ground_truth, extra_info=None):
    extra = {"short": True} if len(solution_str) < 5 else {}
    return {"score": float(len(solution_str)) + float(ground_truth), **extra}


def test_generated_batch_holds_what_the_field_table_asks_for(make_manager):
    gen_batch = gen_batch_of(PROMPTS, n=4)
    output = make_manager(_length_score).generate_sequences(gen_batch)
    assert len(output) == 12
    check_stage_output(output, "gen", {"prompt_row"})
    batch, rows = output.batch, torch.arange(12)
    responses, mask = batch["responses"], batch["response_mask"]
    lengths = mask.sum(1)
    assert torch.equal(batch["prompts"], gen_batch.batch["input_ids"])
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], responses], 1))
    assert torch.equal(batch["attention_mask"][:, 64:], mask)
    assert torch.equal(batch["prompt_row"], rows // 4)
    assert torch.equal(mask, (torch.arange(12) < lengths[:, None]).long())
    assert (responses[mask == 0] == 0).all()
    assert (batch["rollout_log_probs"][mask == 0] == 0).all()
    assert (batch["rollout_log_probs"][mask == 1] < 0).all()
    prompt_lengths = gen_batch.batch["attention_mask"].sum(1)
    last = batch["position_ids"][rows, 63 + lengths]
    assert torch.equal(last, prompt_lengths + lengths - 1)
    for row, reason in enumerate(output.non_tensor_batch["finish_reason"]):
        ended = responses[row, lengths[row] - 1] == 2
        assert reason == ("stop" if ended else "length")
    assert output.non_tensor_batch["__num_turns__"].tolist() == [2] * 12
    assert batch["weight_version_min"].tolist() == batch["weight_version_max"].tolist() == [-1] * 12


def test_scores_stand_on_the_last_token_and_extra_keys_are_joined(make_manager, tokenizer):
    output = make_manager(_length_score).generate_sequences(gen_batch_of(PROMPTS, n=2))
    mask, scores = output.batch["response_mask"].bool(), output.batch["rm_scores"]
    texts = [decode_response(tokenizer, ids[m].tolist()) for ids, m in zip(output.batch["responses"], mask)]
    for row, text in enumerate(texts):
        assert scores[row].nonzero().tolist() in ([], [[int(mask[row].sum()) - 1]])
        assert scores[row].sum() == len(text) + row // 2
    assert output.meta_info["reward_extra_keys"] == (["short"] if "short" in output.non_tensor_batch else [])


def test_rollouts_of_a_group_differ_and_a_run_repeats_bit_for_bit(make_manager):
    gen_batch = gen_batch_of(PROMPTS, n=4)
    first, second = (make_manager().generate_sequences(gen_batch) for _ in range(2))
    for key, tensor in first.batch.items():
        assert torch.equal(tensor, second.batch[key]), key
    for group in first.batch["responses"].view(3, 4, -1):
        assert len({tuple(row) for row in group.tolist()}) == 4
    other_epoch = make_manager().generate_sequences(gen_batch_of(PROMPTS, n=4, epoch=1))
    assert not torch.equal(other_epoch.batch["responses"], first.batch["responses"])


def test_seeds_depend_on_each_of_their_parts():
    base = sample_seed(1, 2, 3, 4, False)
    changes = [(0, 2, 3, 4, False), (1, 0, 3, 4, False), (1, 2, 0, 4, False), (1, 2, 3, 0, False), (1, 2, 3, 4, True)]
    others = [sample_seed(*parts) for parts in [*changes, (12, 3, 4, 0, False)]]
    assert base == sample_seed(1, 2, 3, 4, False)
    assert len({base, *others}) == 7
    assert all(0 <= seed < 2**31 for seed in [base, *others])


def test_validation_uses_its_own_sampling(make_manager):
    manager = make_manager()
    batch = gen_batch_of(PROMPTS, n=2, validate=True, temperature=0.0)
    greedy = manager.generate_sequences(batch).batch["responses"].view(3, 2, -1)
    assert torch.equal(greedy[:, 0], greedy[:, 1])
    manager = make_manager(**{"val_kwargs.do_sample": True, "val_kwargs.temperature": 1.0})
    sampled = manager.generate_sequences(gen_batch_of(PROMPTS, n=2, validate=True)).batch["responses"].view(3, 2, -1)
    trained = manager.generate_sequences(gen_batch_of(PROMPTS, n=2)).batch["responses"].view(3, 2, -1)
    assert not torch.equal(sampled, trained)


def test_log_probs_are_left_out_where_they_are_not_wanted(make_manager):
    output = make_manager(calculate_log_probs=False).generate_sequences(gen_batch_of(PROMPTS))
    assert "rollout_log_probs" not in output.batch
    assert "rm_scores" not in output.batch


def test_samples_are_collected_as_they_finish_and_collated_in_order(make_manager):
    manager = make_manager()
    gen_batch = gen_batch_of(PROMPTS, n=4)
    handles = manager.submit(gen_batch)
    samples = list(manager.collect(handles))
    assert {(s.uid, s.session) for s in samples} == {(f"u{p}", s) for p in range(3) for s in range(4)}
    shuffled = [samples[i] for i in np.random.default_rng(0).permutation(12)]
    whole = manager.generate_sequences(gen_batch)
    assert torch.equal(manager.collate(shuffled, gen_batch).batch["responses"], whole.batch["responses"])
    with pytest.raises(RolloutError, match="11 samples came back for the 12 rows"):
        manager.collate(samples[1:], gen_batch)


def test_timing_tells_of_the_slowest_sample(make_manager):
    timing = make_manager(_length_score).generate_sequences(gen_batch_of(PROMPTS)).meta_info["timing"]
    for activity in ("generate_sequences", "reward"):
        assert 0 <= timing[f"agent_loop/{activity}/min"] <= timing[f"agent_loop/{activity}/mean"]
        assert timing[f"agent_loop/{activity}/mean"] <= timing[f"agent_loop/{activity}/max"]
    assert timing["agent_loop/slowest/prompt_length"] in (4, 19, 9)
    assert 1 <= timing["agent_loop/slowest/response_length"] <= 12


def test_a_scorers_error_passes_through_and_the_manager_lives_on(make_manager):
    def picky(data_source, solution_str, ground_truth, extra_info=None):
        if ground_truth == "1":
            raise ValueError("no such answer")
        return 1.0

    manager = make_manager(picky)
    with pytest.raises(RewardError, match="no such answer"):
        manager.generate_sequences(gen_batch_of(PROMPTS, n=2))
    assert len(manager.generate_sequences(gen_batch_of(PROMPTS[:1], n=2))) == 2


def test_a_called_off_request_is_an_error_that_names_the_sample(make_manager):
    manager = make_manager(response_length=180, ignore_eos=True)
    handles = manager.submit(gen_batch_of(PROMPTS))
    servers = manager._servers
    while servers.status()[0].running < 3:
        pass
    servers.abort()
    with pytest.raises(RolloutError, match=r"sample u\d session 0 \(dataset row 1\d\) was called off after \d+ tokens"):
        list(manager.collect(handles))


def test_a_batch_that_is_not_done_in_time_is_an_error_and_is_called_off(make_manager):
    manager = make_manager(timeout_s=0.05, response_length=180, ignore_eos=True, max_num_seqs=1)
    with pytest.raises(WorkerTimeoutError, match=r"within 0.05 s"):
        manager.generate_sequences(gen_batch_of(PROMPTS, n=8))
    manager._servers.timeout_s = 10
    status = manager._servers.status()[0]
    assert (status.running, status.waiting) == (0, 0)


def test_a_prompt_without_tokens_is_named_before_anything_starts(make_manager):
    gen_batch = gen_batch_of(PROMPTS)
    gen_batch.batch["attention_mask"][1] = 0
    with pytest.raises(BatchMismatchError, match="row 1 of the generation batch has no prompt token"):
        make_manager().generate_sequences(gen_batch)


def test_an_unknown_agent_loop_is_refused_when_the_manager_is_built(make_manager):
    with pytest.raises(ConfigError, match="unknown agent loop 'single_turn': did you mean 'single_turn_agent'"):
        make_manager(**{"agent.default_agent_loop": "single_turn"})


@register_agent_loop("echo_test")
class Echo(AgentLoopBase):
    """Two turns with a tool's answer between them: three tokens that the policy did not produce."""

    async def run(self, sample):
        first = await self.generate(sample, sample.prompt_ids)
        tool = first.token_ids[:3]
        second = await self.generate(sample, [*sample.prompt_ids, *first.token_ids, *tool], turn=1)
        return AgentLoopOutput(
            sample.index,
            sample.uid,
            sample.session,
            response_ids=[*first.token_ids, *tool, *second.token_ids],
            response_mask=[1] * len(first.token_ids) + [0] * len(tool) + [1] * len(second.token_ids),
            log_probs=[*first.log_probs, *[0.0] * len(tool), *second.log_probs],
            num_turns=4,
            finish_reason=second.finish_reason,
            weight_version_min=min(first.weight_version_min, second.weight_version_min),
            weight_version_max=max(first.weight_version_max, second.weight_version_max),
        )


def test_rows_choose_their_loop_and_tool_tokens_are_masked(make_manager):
    manager = make_manager(ignore_eos=True, response_length=40)
    manager._section = replace_rollout(manager._section, response_length=8)
    gen_batch = gen_batch_of(PROMPTS)
    gen_batch.non_tensor_batch["agent_name"] = np.array([None, "echo_test", "single_turn_agent"], dtype=object)
    samples = list(manager.collect(manager.submit(gen_batch)))
    manager._section = replace_rollout(manager._section, response_length=40)
    output = manager.collate(samples, gen_batch)
    assert output.batch["response_mask"].sum(1).tolist() == [8, 16, 8]
    assert output.batch["attention_mask"][:, 64:].sum(1).tolist() == [8, 19, 8]
    assert output.batch["response_mask"][1, 8:11].tolist() == [0, 0, 0]
    assert output.non_tensor_batch["__num_turns__"].tolist() == [2, 4, 2]
    manager._section = replace_rollout(manager._section, response_length=8)
    with pytest.raises(RolloutError, match=r"row 1 has 19 tokens; at most rollout.response_length=8 fit"):
        manager.collate(samples, gen_batch)
    crooked = [replace(s, response_mask=s.response_mask[1:]) for s in samples]
    with pytest.raises(RolloutError, match=r"row 0 has response_ids, response_mask and log_probs of different lengths"):
        manager.collate(crooked, gen_batch)


def replace_rollout(section, **values):
    return section.model_copy(update={"rollout": section.rollout.model_copy(update=values)})


def test_an_empty_response_carries_no_score(make_manager):
    manager = make_manager(_length_score)
    gen_batch = gen_batch_of(PROMPTS)
    samples = list(manager.collect(manager.submit(gen_batch)))
    samples[0] = replace(samples[0], response_ids=[], response_mask=[], log_probs=[])
    output = manager.collate(samples, gen_batch)
    row = samples[0].index
    assert output.batch["rm_scores"][row].abs().sum() == 0
    assert output.batch["response_mask"][row].sum() == 0


def test_the_vocabulary_of_the_test_models_covers_their_tokenizer(tokenizer):
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == 2
    assert len(tokenizer) >= VOCAB  # every token id of a test model decodes
