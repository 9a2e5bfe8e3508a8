"""What algorithms exist, where each lives and what it needs. Imports no torch: a config is checked in milliseconds.

A new family is one file with a function and one row here; `registry.py` adds rows at run time for functions of your
own. Where the name of an estimator or a policy loss is taken, `"module:function"` is taken too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ppo_lib.errors import ConfigError


@dataclass(frozen=True)
class AdvEstimator:
    """One row of `ADV_ESTIMATORS`.

    Args:
        needs: envelope fields it cannot do without beyond rewards and mask: `values` (so a critic), `uid` (so the
            rollouts of one prompt are compared, and one rollout a prompt teaches nothing), `reward_baselines` (so a
            greedy rollout a prompt), `old_log_probs`, `sum_pi_squared` (both from the actor).
        uses: keywords it takes into account where they are there.
        settings: keys of section `algorithm` it reads; None where nobody has said.
    """

    name: str
    function: str | Callable[..., Any]
    needs: frozenset[str] = frozenset()
    summary: str = ""
    paper: str = ""
    uses: frozenset[str] = frozenset()
    settings: frozenset[str] | None = None
    formula: str = ""
    when: str = ""

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator reads `values`."""
        return "values" in self.needs

    @property
    def compares_rollouts(self) -> bool:
        """Whether the estimator compares the rollouts of one prompt, so that `rollout.n` should be above 1."""
        return "uid" in self.needs


@dataclass(frozen=True)
class PolicyLoss:
    """One row of `POLICY_LOSSES`.

    Args:
        settings: keys of section `actor_rollout_ref.actor` it reads; None where nobody has said.
        of_mini_batch: for a loss that has to know the whole mini-batch, so that micro-batches and ranks do not matter:
            (old_log_prob, log_prob, advantages, config) -> anything, from all policy tokens (N,) of the mini-batch,
            with the log-probs before its step. Whoever trains calls it once a mini-batch, on every rank with the tokens
            of all ranks in the same order, and gives the result to each micro-batch as `config.mini_batch`.
        draws: whether it draws tokens at random, and so takes `config.draws`; its `of_mini_batch` function too.
        bypass: whether it is for bypass mode, where `old_log_prob` holds the rollout's log-probs.
    """

    name: str
    function: str | Callable[..., Any]
    summary: str = ""
    paper: str = ""
    settings: frozenset[str] | None = None
    of_mini_batch: str | Callable[..., Any] | None = None
    draws: bool = False
    bypass: bool = False
    formula: str = ""
    when: str = ""


def _table(*rows: Any) -> dict[str, Any]:
    return {row.name: row for row in rows}


def _estimator(name: str, function: str, needs: str, settings: str = "", uses: str = "", **text: Any) -> AdvEstimator:
    return AdvEstimator(
        name,
        f"ppo_lib.algorithms.advantages.{function}",
        needs=frozenset(needs.split()),
        settings=frozenset(settings.split()),
        uses=frozenset(uses.split()),
        **text,
    )


_GRPO: dict[str, Any] = {
    "function": "grpo:compute_grpo_advantage",
    "needs": "uid",
    "settings": "norm_adv_by_std_in_grpo",
    "summary": "outcome minus the mean of its group, over the group's standard deviation",
    "paper": "arXiv:2402.03300; without the division (Dr. GRPO) arXiv:2503.20783",
    "formula": "A = (s - mean_g s) / (std_g s + 1e-6)",
    "when": "the usual choice for outcome rewards without a critic",
}
_RLOO: dict[str, Any] = {
    "function": "baselines:compute_rloo_advantage",
    "needs": "uid",
    "summary": "outcome minus the mean outcome of the other responses to the prompt",
    "paper": "arXiv:2402.14740",
    "formula": "A = (s - mean_g s) n / (n - 1)",
    "when": "outcome rewards where dividing by the deviation is not wanted; unbiased",
}
_ENERGY: dict[str, Any] = {
    "needs": "uid old_log_probs sum_pi_squared",
    "uses": "rollout_is_weights",
    "paper": "the baseline of least variance: Greensmith, Bartlett and Baxter, JMLR 5, 2004",
    "formula": "A_t = R_t - sum_g W_t R_t / sum_g W_t,  W_t = sum_{j<=t} 1 - 2 pi_j + sum_v pi_v^2",
}

ADV_ESTIMATORS: dict[str, AdvEstimator] = _table(
    _estimator(
        "gae",
        "gae:compute_gae_advantage_return",
        needs="values",
        settings="gamma lam",
        summary="exponentially weighted temporal differences of a critic, whitened over the batch",
        paper="arXiv:1506.02438",
        formula="A_t = delta_t + gamma lam A_{t+1},  delta_t = r_t + gamma V_{t+1} - V_t",
        when="rewards along the way, or one rollout a prompt, and a critic to spare",
    ),
    _estimator("grpo", **_GRPO),
    _estimator("grpo_vectorized", **_GRPO),
    _estimator(
        "grpo_passk",
        "grpo:compute_grpo_passk_advantage",
        needs="uid",
        settings="norm_adv_by_std_in_grpo",
        summary="only the best response of a group is rewarded, by its lead over the second",
        paper="arXiv:2503.19595",
        formula="A = (s_best - s_second) / (std_g s + 1e-6) for the best, 0 for the others",
        when="what counts is that one of k attempts succeeds",
    ),
    _estimator("rloo", **_RLOO),
    _estimator("rloo_vectorized", **_RLOO),
    _estimator(
        "opo",
        "baselines:compute_opo_advantage",
        needs="uid",
        summary="outcome minus the mean of its group weighted by length",
        paper="arXiv:2505.23585",
        formula="A = s - sum_g l s / sum_g l",
        when="on-policy steps on responses of very different lengths",
    ),
    _estimator(
        "remax",
        "baselines:compute_remax_advantage",
        needs="reward_baselines",
        summary="reward to go minus the outcome of the prompt's greedy response",
        paper="arXiv:2310.10505",
        formula="A_t = R_t - s_greedy,  R_t = r_t + R_{t+1}",
        when="few rollouts a prompt (one will do), at the price of one greedy rollout more",
    ),
    _estimator(
        "gpg",
        "baselines:compute_gpg_advantage",
        needs="uid",
        summary="outcome minus the mean of its group, scaled up where few outcomes of the batch are not 0",
        paper="arXiv:2504.02546",
        formula="A = (s - mean_g s) B / #{s != 0}",
        when="with the gpg loss, on sparse 0/1 rewards",
    ),
    _estimator(
        "reinforce_plus_plus",
        "reinforce_plus_plus:compute_reinforce_plus_plus_advantage",
        needs="",
        settings="gamma",
        summary="discounted reward to go, whitened over the batch",
        paper="arXiv:2501.03262",
        formula="A_t = whiten(R_t),  R_t = r_t + gamma R_{t+1}",
        when="one rollout a prompt and no critic, or a KL in the reward that should count token by token",
    ),
    _estimator(
        "reinforce_plus_plus_baseline",
        "reinforce_plus_plus:compute_reinforce_plus_plus_baseline_advantage",
        needs="uid",
        summary="outcome minus the mean of its group, whitened over the batch",
        paper="arXiv:2501.03262",
        formula="A = whiten(s - mean_g s)",
        when="groups as in grpo, but one scale for all prompts",
    ),
    _estimator(
        "gdpo",
        "gdpo:compute_gdpo_advantage",
        needs="uid",
        settings="gdpo_reward_keys gdpo_reward_weights",
        uses="reward_components",
        summary="each component of the reward normalised in its group, added, whitened over the batch",
        paper="arXiv:2601.05242",
        formula="A = whiten(sum_k w_k (c_k - mean_g c_k) / (std_g c_k + 1e-6))",
        when="several rewards on different scales (`algorithm.gdpo_reward_keys`)",
    ),
    _estimator(
        "optimal_token_baseline",
        "optimal_token_baseline:compute_optimal_token_baseline_advantage",
        summary="reward to go minus a baseline for each token, weighted by the gradient gathered so far",
        when="long responses, where one baseline for all tokens leaves much variance",
        **_ENERGY,
    ),
    _estimator(
        "tir_optimal_token_baseline",
        "optimal_token_baseline:compute_tir_optimal_token_baseline_advantage",
        summary="optimal_token_baseline with positions counted in policy tokens, over tool answers of any length",
        when="the same with tools",
        **_ENERGY,
    ),
)


def _loss(name: str, function: str, settings: str = "", of_mini_batch: str = "", **more: Any) -> PolicyLoss:
    package = "ppo_lib.algorithms.policy_losses"
    return PolicyLoss(
        name,
        f"{package}.{function}",
        settings=frozenset(settings.split()),
        of_mini_batch=f"{package}.{of_mini_batch}" if of_mini_batch else None,
        **more,
    )


_CLIP = "clip_ratio clip_ratio_low clip_ratio_high"

POLICY_LOSSES: dict[str, PolicyLoss] = _table(
    _loss(
        "vanilla",
        "vanilla:compute_policy_loss_vanilla",
        settings=f"{_CLIP} clip_ratio_c",
        summary="PPO: the ratio clipped below and above, and from below again where the advantage is negative",
        paper="arXiv:1707.06347; dual clip arXiv:1912.09729; asymmetric clip arXiv:2503.14476",
        formula="max(-A r, -A clip(r, 1 - low, 1 + high)); at most -A c where A < 0",
        when="the default",
    ),
    _loss(
        "gspo",
        "gspo:compute_policy_loss_gspo",
        settings=_CLIP,
        summary="PPO with one ratio a sequence, the geometric mean of its tokens' ratios",
        paper="arXiv:2507.18071",
        formula="max(-A s, -A clip(s, 1 - low, 1 + high)),  s = exp(mean_t log r_t)",
        when="outcome rewards and mixture-of-experts models; clips near 3e-4, seq-mean-token-mean",
    ),
    _loss(
        "sapo",
        "sapo:compute_policy_loss_sapo",
        settings="tau_pos tau_neg",
        summary="a sigmoid gate around ratio 1 in place of the clip",
        paper="arXiv:2511.20347",
        formula="-A (4 / tau) sigmoid(tau (r - 1)),  tau = tau_pos where A > 0, else tau_neg",
        when="clipping throws too much gradient away; seq-mean-token-mean",
    ),
    _loss(
        "gpg",
        "policy_gradient:compute_policy_loss_gpg",
        summary="the plain policy gradient",
        paper="arXiv:2504.02546",
        formula="-A log pi",
        when="one optimizer step per rollout, with the gpg estimator",
    ),
    _loss(
        "clip_cov",
        "covariance:compute_policy_loss_clip_cov",
        settings=f"{_CLIP} policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub",
        of_mini_batch="covariance:clip_cov_rule",
        draws=True,
        summary="PPO without a few tokens, drawn among those of large covariance between log-probability and advantage",
        paper="arXiv:2505.22617",
        formula="as vanilla, 0 for a share of clip_cov_ratio drawn where lb < (log pi - mean)(A - mean) < ub",
        when="the entropy collapses early; costs a second forward pass where a mini-batch has several micro-batches",
    ),
    _loss(
        "kl_cov",
        "covariance:compute_policy_loss_kl_cov",
        settings="policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef",
        of_mini_batch="covariance:kl_cov_rule",
        summary="the unclipped ratio, with a KL penalty on the few tokens of largest covariance",
        paper="arXiv:2505.22617",
        formula="-A r, + ppo_kl_coef |log r| for kl_cov_ratio of the tokens, those of largest covariance",
        when="as clip_cov, gentler",
    ),
    _loss(
        "geo_mean",
        "geo_mean:compute_policy_loss_geo_mean",
        settings=_CLIP,
        summary="the geometric mean of a sequence's ratios, each clipped in log space",
        paper="arXiv:2507.20673",
        formula="-A exp(mean_t d_t),  d = log r, at most high where A > 0, at least -low where A < 0",
        when="single tokens with extreme ratios upset training; low and high near 0.4, seq-mean-token-mean",
    ),
    _loss(
        "dppo_tv",
        "dppo:compute_policy_loss_dppo_tv",
        settings=f"{_CLIP} clip_ratio_c",
        summary="truncated policy gradient of tokens whose probability has not moved too far",
        paper="arXiv:2602.04879",
        formula="-A sg(min(r, c)) log pi, 0 where |pi - pi_old| is above its bound in the direction of A",
        when="large vocabularies and off-policy data, where ratios of rare tokens mislead",
    ),
    _loss(
        "dppo_kl",
        "dppo:compute_policy_loss_dppo_kl",
        settings=f"{_CLIP} clip_ratio_c",
        summary="dppo_tv with the binary KL divergence as the distance",
        paper="arXiv:2602.04879",
        formula="as dppo_tv with pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))",
        when="as dppo_tv",
    ),
    _loss(
        "dro",
        "dro:compute_policy_loss_dro",
        settings="policy_loss.dro_beta",
        summary="the policy gradient with a quadratic penalty on the log ratio",
        paper="arXiv:2405.19107",
        formula="-(A log pi - beta / 2 (log r)^2)",
        when="responses sampled by another policy",
    ),
    _loss(
        "cispo",
        "cispo:compute_policy_loss_cispo",
        settings=_CLIP,
        summary="the policy gradient weighted by the clipped ratio, held constant",
        paper="arXiv:2506.13585",
        formula="-sg(clip(r, 1 - low, 1 + high)) A log pi",
        when="many steps per rollout, where no token should lose its gradient",
    ),
    _loss(
        "ppo_clip",
        "vanilla:compute_policy_loss_ppo_clip",
        settings=f"{_CLIP} clip_ratio_c",
        bypass=True,
        summary="vanilla against the policy that sampled, without further importance weights",
        paper="arXiv:1707.06347",
        formula="as vanilla, r = pi / pi_rollout",
        when="bypass mode: the rollout's log-probs are taken for the old ones",
    ),
    _loss(
        "reinforce",
        "policy_gradient:compute_policy_loss_reinforce",
        bypass=True,
        summary="the policy gradient, times the importance weights of rollout correction",
        paper="Williams 1992",
        formula="-w A log pi",
        when="bypass mode without a clip",
    ),
)

POLICY_LOSS_SETTINGS: frozenset[str] = frozenset().union(*(row.settings or () for row in POLICY_LOSSES.values()))
"""Keys of section `actor_rollout_ref.actor` that some policy loss here reads."""

LOSS_AGG_MODES: dict[str, str] = {
    "token-mean": "sum over tokens / number of tokens",
    "token-sum": "sum over tokens",
    "seq-mean-token-sum": "sum over tokens / number of sequences",
    "seq-mean-token-mean": "mean over a sequence's tokens, then mean over sequences",
    "seq-mean-token-sum-norm": "sum over tokens / (number of sequences * a constant horizon)",
}

_KL_FORMS: dict[str, str] = {
    "kl": "log ratio",
    "k1": "log ratio",
    "abs": "|log ratio|",
    "mse": "(log ratio)^2 / 2",
    "k2": "(log ratio)^2 / 2",
    "low_var_kl": "1/ratio - 1 + log ratio",
    "k3": "1/ratio - 1 + log ratio",
}
KL_PENALTIES: dict[str, str] = {
    **_KL_FORMS,
    **{f"{name}+": f"{form}, with the gradient of (log ratio)^2 / 2" for name, form in _KL_FORMS.items()},
}

KL_FROM_LOGITS: dict[str, str] = {
    "full": "sum over the vocabulary of pi (log pi - log pi_ref)",
    "full+": "the same: its gradient already is that of the KL",
}
"""Forms that need the logits of both models, of which a training step only keeps the sampled tokens' log-probs."""

KL_CONTROLLERS: dict[str, str] = {
    "fixed": "the coefficient stays kl_coef",
    "adaptive": "the coefficient moves to hold the KL at target_kl",
}


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a `name` of `kind` that nothing is known by, with the nearest name that is."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {kind} {name!r}: {hint}known are {', '.join(known)}")


def is_reference(name: object) -> bool:
    """Whether `name` has the form `"module:function"`."""
    if not isinstance(name, str) or name.count(":") != 1:
        return False
    module, function = name.split(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _find(kind: str, name: str, table: Mapping[str, Any], row: Callable[..., Any]) -> Any:
    if name in table:
        return table[name]
    if is_reference(name):
        return row(name, name)
    error = unknown_name(kind, name, table)
    raise ConfigError(f"{error}; a function of your own is given as 'module:function'")


def find_adv_estimator(name: str) -> AdvEstimator:
    """The row of an advantage estimator, or of a `"module:function"`.

    Nothing is imported, so the row of a `"module:function"` states no needs: set `critic.enable` for one that reads
    `values`.
    """
    return _find("advantage estimator", name, ADV_ESTIMATORS, AdvEstimator)


def check_kl_penalty(name: str) -> None:
    """Refuse a form of the KL that is unknown, or that a training step cannot compute.

    Raises:
        ConfigError: with the nearest name.
    """
    if name in KL_FROM_LOGITS:
        raise ConfigError(
            f"KL estimator {name!r} sums over the vocabulary and needs the logits of policy and reference side by "
            "side, which no pass over a batch keeps; only ppo_lib.algorithms.kl has it: use low_var_kl, or kl"
        )
    if name not in KL_PENALTIES:
        raise unknown_name("KL estimator", name, KL_PENALTIES)


def find_policy_loss(name: str) -> PolicyLoss:
    """The row of a policy loss, or of a `"module:function"`; nothing is imported."""
    return _find("policy loss", name, POLICY_LOSSES, PolicyLoss)
