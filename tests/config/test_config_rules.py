"""Numbers that do not fit together are refused with numbers that do; keys without effect get one line."""

from __future__ import annotations

import re

import pytest

from ppo_lib.config import load_config, need_critic, need_old_log_probs, need_reference_policy, step_arithmetic
from ppo_lib.config.effects import engine_notices
from ppo_lib.errors import ConfigError

# 16 prompts x 2 rollouts on 4 ranks, mini-batches of 8 prompts: small numbers that fit
FITTING = {
    "data.train_batch_size": 16,
    "data.max_prompt_length": 10,
    "data.max_response_length": 20,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "algorithm.adv_estimator": "grpo",
    "trainer.n_gpus_per_node": 4,
}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def load(**changed):
    keys = FITTING | {key.replace("__", "."): value for key, value in changed.items()}
    return load_config(overrides=[f"{key}={value}" for key, value in keys.items()])


def load_with(*overrides: str):
    return load_config(overrides=[*(f"{key}={value}" for key, value in FITTING.items()), *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_with(*overrides)
    return str(caught.value)


def proposals(text: str) -> list[list[str]]:
    """The overrides that a refusal proposes: one list for each value of "set KEY to A or B"."""
    key, values = re.search(r"set ([\w.]+) to ([-\d]+(?: or [-\d]+)*)", text).groups()
    return [[f"{key}={value}"] for value in values.split(" or ")]


REFUSED = [
    ([f"{ACTOR}.ppo_mini_batch_size=32"], "ppo_mini_batch_size=32 prompts is more than data.train_batch_size=16"),
    (
        [f"{ACTOR}.ppo_mini_batch_size=6"],
        "data.train_batch_size=16 is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size=6",
    ),
    ([f"{ACTOR}.ppo_mini_batch_size=1"], "1 prompts x 2 rollouts make 2 rows, which 4 ranks"),
    (["trainer.n_gpus_per_node=3"], "16 prompts x 2 rollouts make 32 rows, which 3 ranks"),
    (["trainer.nnodes=3"], "which 12 ranks (trainer.nnodes x trainer.n_gpus_per_node) cannot share evenly"),
    ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"], "does not divide the 4 rows of a mini-batch on one rank"),
    ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"], "does not divide the 4 rows of a mini-batch on one rank"),
    (
        [f"{ACTOR}.ppo_max_token_len_per_gpu=29"],
        "ppo_max_token_len_per_gpu=29 (also actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu)"
        " is below the longest row, 30 = 10 prompt + 20 response tokens",
    ),
    (
        [f"{ROLLOUT}.log_prob_max_token_len_per_gpu=29"],
        "rollout.log_prob_max_token_len_per_gpu=29 is below the longest row",
    ),
    (
        [f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=29"],
        "ref.log_prob_max_token_len_per_gpu=29 is below",
    ),
    (
        ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=6"],
        "is not a multiple of critic.ppo_mini_batch_size=6",
    ),
    (
        ["algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=3"],
        "critic.ppo_micro_batch_size_per_gpu=3 does not divide the 4 rows",
    ),
    (
        ["algorithm.adv_estimator=gae", "critic.ppo_max_token_len_per_gpu=20"],
        "critic.ppo_max_token_len_per_gpu=20 (also critic.forward_max_token_len_per_gpu) is below the longest row",
    ),
    (
        ["algorithm.adv_estimator=gae", "critic.forward_max_token_len_per_gpu=20"],
        "critic.forward_max_token_len_per_gpu=20 is below the longest row",
    ),
    (
        [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.tensor_model_parallel_size=3"],
        "tensor_model_parallel_size=3 does not divide trainer.n_gpus_per_node=4",
    ),
    ([f"{ACTOR}.fsdp_config.fsdp_size=3"], "actor.fsdp_config.fsdp_size=3 does not divide the 4 ranks"),
    ([f"{ACTOR}.fsdp_config.fsdp_size=0"], "actor.fsdp_config.fsdp_size=0 does not divide the 4 ranks"),
    ([f"{ROLLOUT}.max_model_len=29"], "rollout.max_model_len=29 is below the longest row"),
    (["trainer.critic_warmup=5"], "trainer.critic_warmup=5, but algorithm.adv_estimator=grpo trains no critic"),
    (["trainer.worker_group=local"], "trainer.worker_group=local runs one rank in this process"),
    ([f"{ROLLOUT}.val_kwargs.do_sample=true"], "val_kwargs.do_sample=true needs a temperature above 0"),
    ([f"{ROLLOUT}.top_k=0"], "rollout.top_k=0 leaves no token to sample"),
    (
        ["algorithm.adv_estimator=gae", "critic.enable=false"],
        "critic.enable=false, but algorithm.adv_estimator=gae needs a critic",
    ),
    (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
    (
        [f"{ROLLOUT}.prompt_length=11"],
        "rollout.prompt_length=11 differs from data.max_prompt_length=10; set only data.max_prompt_length",
    ),
    ([f"{ROLLOUT}.response_length=11"], "rollout.response_length=11 differs from data.max_response_length=20"),
    (["reward.reward_manager.source=importlib"], "needs reward.reward_manager.module.path"),
    (["data.train_max_samples=0"], "data.train_max_samples=0 leaves no rows; set data.train_max_samples to -1 for all"),
    (["data.val_max_samples=0"], "data.val_max_samples=0 leaves no rows"),
    (["data.sampler.class_name=C"], "data.sampler needs both class_path (a Python file) and class_name"),
    (["data.custom_cls.path=x.py"], "data.custom_cls needs both path (a Python file) and name"),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSED, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_numbers_that_do_not_fit_are_refused_once(overrides, says):
    text = refusal(*overrides)
    assert says in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "overrides",
    [overrides for overrides, says in REFUSED if re.search("prompts|divide|multiple|below the longest|top_k", says)],
    ids=lambda value: value[-1],
)
def test_what_a_refusal_proposes_works(overrides):
    for proposal in proposals(refusal(*overrides)):
        if "data.train_batch_size" in proposal[0]:  # and a mini-batch that goes with it
            size = proposal[0].partition("=")[2]
            proposal.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={size}")
        load_with(*overrides, *proposal)


def test_the_numbers_of_a_step_by_hand():
    # 16 prompts x 2 = 32 rows, 8 a rank; mini-batch 8 x 2 = 16 rows, 4 a rank, 2 of them a step, twice
    numbers = step_arithmetic(load_with(f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"))
    assert (numbers.world_size, numbers.prompts_per_step, numbers.rollouts_per_prompt) == (4, 16, 2)
    assert (numbers.rows_per_step, numbers.rows_per_rank, numbers.row_tokens) == (32, 8, 30)
    assert (numbers.prompts_per_mini_batch, numbers.rows_per_mini_batch) == (8, 16)
    assert (numbers.rows_per_rank_per_mini_batch, numbers.mini_batches_per_step) == (4, 2)
    assert numbers.optimizer_steps_per_rollout == 4
    assert numbers.critic is None
    assert numbers.replicas == 4
    table = numbers.table()
    assert "32 = 16 x 2" in table
    assert "2 rows a rank, 2 micro-batches" in table
    assert "4 a step = 2 mini-batches x 2 epochs" in table


def test_the_critic_has_numbers_of_its_own():
    config = load_with("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=4", "critic.ppo_epochs=3")
    critic = step_arithmetic(config).critic
    assert (critic.mini_batches_per_step, critic.optimizer_steps_per_rollout) == (4, 12)
    assert "packed up to 32768 tokens" in critic.micro_batching


def test_sglang_replicas_span_ranks_and_hf_replicas_do_not():
    parallel = f"{ROLLOUT}.tensor_model_parallel_size=2"
    assert step_arithmetic(load_with(parallel, f"{ROLLOUT}.name=sglang")).replicas == 2
    assert step_arithmetic(load_with(parallel, f"{ROLLOUT}.name=hf")).replicas == 4
    assert step_arithmetic(load_with(parallel, f"{ROLLOUT}.name=auto"), engine="sglang").replicas == 2


def test_neither_micro_batches_nor_dynamic_batching_gets_the_token_cap():
    assert "packed up to 16384 tokens" in step_arithmetic(load()).actor.micro_batching
    # and a row longer than a cap that is not in use is no problem
    load_with(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"{ACTOR}.ppo_max_token_len_per_gpu=5",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2",
    )


def test_what_a_run_needs():
    gae, grpo = load(algorithm__adv_estimator="gae"), load()
    assert need_critic(gae)
    assert not need_critic(grpo)
    assert need_critic(load(critic__enable="true"))
    assert not need_reference_policy(grpo)
    assert need_reference_policy(load(algorithm__use_kl_in_reward="true"))
    assert need_reference_policy(load_with(f"{ACTOR}.use_kl_loss=true"))


def test_old_log_probs_are_left_out_only_where_they_change_nothing():
    auto, one = f"{ACTOR}.recompute_old_log_probs=auto", f"{ACTOR}.ppo_mini_batch_size=16"
    assert not need_old_log_probs(load_with(auto, one))
    assert need_old_log_probs(load_with(auto, one, f"{ROLLOUT}.name=sglang"))
    assert need_old_log_probs(load_with(auto, one), engine="sglang")
    assert need_old_log_probs(load_with(one))
    assert need_old_log_probs(load_with(auto))
    assert need_old_log_probs(load_with(auto, one, f"{ACTOR}.ppo_epochs=2"))
    assert need_old_log_probs(load_with(auto, one, "algorithm.use_kl_in_reward=true"))
    assert need_old_log_probs(load_with(auto, one, "algorithm.adv_estimator=my.module:estimator"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            [f"{ROLLOUT}.gpu_memory_utilization=0.4"],
            "rollout.gpu_memory_utilization has no effect: only the sglang engine reads it",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2"],
            "tensor_model_parallel_size has no effect: only the sglang engine",
        ),
        (
            ["critic.optim.lr=1", "critic.ppo_epochs=2"],
            "critic.optim.lr, critic.ppo_epochs have no effect: this advantage estimator needs no critic",
        ),
        (["actor_rollout_ref.model.lora_alpha=8"], "model.lora_alpha has no effect: LoRA is off: lora_rank is 0"),
        (
            ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_adapter_path=x"],
            "model.lora_rank has no effect: the adapter at lora_adapter_path has its own",
        ),
        (
            [
                "actor_rollout_ref.model.lora_rank=8",
                "actor_rollout_ref.ref.fsdp_config.dtype=float32",
                f"{ACTOR}.use_kl_loss=true",
            ],
            "ref.fsdp_config.dtype has no effect: with LoRA the reference is the policy without its adapter",
        ),
        (["actor_rollout_ref.ref.fsdp_config.dtype=float32"], "has no effect: without a KL no reference is kept"),
        (["algorithm.kl_ctrl.kl_coef=0.1"], "algorithm.kl_ctrl.kl_coef has no effect: use_kl_in_reward is false"),
        ([f"{ACTOR}.kl_loss_coef=0.1"], "kl_loss_coef has no effect: use_kl_loss is false"),
        (["algorithm.lam=0.9"], "algorithm.lam has no effect: adv_estimator grpo does not read it"),
        ([f"{ACTOR}.tau_pos=2"], "actor.tau_pos has no effect: the policy loss vanilla does not read it"),
        (
            [f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.clip_ratio_c=4"],
            "clip_ratio_c has no effect: the policy loss",
        ),
        ([f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"], "use_dynamic_bsz packs rows"),
        ([f"{ROLLOUT}.val_kwargs.n=4"], "val_kwargs.n has no effect: val_kwargs.do_sample is false, so all responses"),
        (
            [f"{ACTOR}.grad_clip=2", f"{ACTOR}.optim.clip_grad=3"],
            "actor.grad_clip has no effect: actor_rollout_ref.actor.optim.clip_grad is",
        ),
        (
            [f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=0.3", f"{ACTOR}.clip_ratio_high=0.4"],
            "actor.clip_ratio has no effect: clip_ratio_low and",
        ),
        (
            ["data.sampler.class_path=x.py", "data.sampler.class_name=C", "data.shuffle=false"],
            "data.shuffle has no effect: data.sampler gives the order",
        ),
        (["trainer.resume_from_path=x"], "trainer.resume_from_path has no effect: resume_mode is not resume_path"),
        ([f"{ROLLOUT}.n=1"], "rollout.n=1: grpo compares the rollouts of one prompt"),
        (["reward.custom_reward_function.reward_kwargs={a: 1}"], "has no effect: its path is not set"),
    ],
)
def test_a_key_without_effect_gets_one_line(overrides, says):
    notices = load_with(*overrides).notices
    assert len(notices) == 1
    assert says in notices[0]


def test_a_key_with_effect_or_with_its_default_gets_none():
    assert load().notices == ()
    assert load_with("algorithm.kl_ctrl.kl_coef=0.001", "critic.optim.lr=1e-5", "trainer.seed=4").notices == ()
    assert load_with("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1").notices == ()
    assert load_with(f"{ACTOR}.policy_loss.loss_mode=dro", f"{ACTOR}.policy_loss.dro_beta=0.1").notices == ()
    assert load_with(f"{ACTOR}.policy_loss.loss_mode=os.path:join", f"{ACTOR}.tau_pos=2").notices == ()
    assert load_with(f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.gpu_memory_utilization=0.4").notices == ()
    config = load_with(f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.gpu_memory_utilization=0.4")
    assert engine_notices(config, "sglang", "cuda") == []
    assert engine_notices(config, "sglang", "cpu") == [
        f"{ROLLOUT}.gpu_memory_utilization has no effect: sglang runs on the CPU here"
    ]


def test_notices_are_logged(caplog):
    load_with("algorithm.lam=0.9")
    assert [record.getMessage() for record in caplog.records] == list(load_with("algorithm.lam=0.9").notices)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{ROLLOUT}.stop=['x', '']"], "stop holds an empty string"),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=6"],
            "kl_ctrl.horizon=6 is a fifth of the 32 sequences of a step or less",
        ),
        ([f"{ACTOR}.checkpoint.save_contents=[optimizer]"], "load_contents=['optimizer'] leaves the model out"),
    ],
)
def test_what_would_fail_or_go_wrong_in_the_run_is_refused_at_load(overrides, says):
    assert says in refusal(*overrides)


def test_a_run_that_never_resumes_may_save_what_it_likes():
    load_with(f"{ACTOR}.checkpoint.save_contents=[optimizer]", "trainer.resume_mode=disable")
