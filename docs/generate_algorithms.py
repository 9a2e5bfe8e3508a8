"""Writes `algorithms.md`, the page of all algorithms, from the tables that a configuration is checked against.

python docs/generate_algorithms.py
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ppo_lib.algorithms import advantages, names, policy_losses
from ppo_lib.algorithms.correction_names import REJECTIONS

PAGE = Path(__file__).with_name("algorithms.md")
COMMAND = "python docs/generate_algorithms.py"

INTRODUCTION = """\
# Algorithms

<!-- Written by `{command}`: change the tables in ppo_lib/algorithms/names.py, then run it again. -->

An algorithm is chosen by its name in YAML, and where a name stands, a function of your own may stand as
`module:function`:

```yaml
algorithm: {{adv_estimator: rloo}}
actor_rollout_ref: {{actor: {{policy_loss: {{loss_mode: cispo}}, loss_agg_mode: seq-mean-token-mean}}}}
```

`register_adv_est` and `register_policy_loss` in `ppo_lib.algorithms` add names. Every function stands alone, tensors in
and tensors out: `get_adv_estimator_fn("rloo")(token_level_rewards=..., response_mask=..., index=...)`.

Notation: r a token's reward, s the outcome of a response (the sum of its rewards on policy tokens), g the responses to
its prompt and n their number, l a response's policy tokens, V the critic's value, A the advantage, pi the probability
of a token now, r (in losses) = pi / pi_old, w an importance weight, sg(.) a constant for the gradient.
"""

NEEDS = {
    "values": "a critic",
    "uid": "several rollouts a prompt",
    "reward_baselines": "one greedy rollout a prompt",
    "old_log_probs": "the actor's log-probs before the update",
    "sum_pi_squared": "its sum of squared probabilities",
    "rollout_is_weights": "weights of rollout correction",
    "reward_components": "the columns of the scorer named in `algorithm.gdpo_reward_keys`",
}


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION.format(command=COMMAND), *_estimators(), *_losses(), *_tables()])


def _estimators() -> list[str]:
    lines = ["## Advantage estimators: `algorithm.adv_estimator`\n", f"{_rules(advantages)}\n"]
    for twins, row in _by_function(names.ADV_ESTIMATORS.values()):
        uses = [f"where there: {NEEDS[name]}" for name in sorted(row.uses)]
        lines += _entry(twins, row, [NEEDS[name] for name in NEEDS if name in row.needs] + uses, "algorithm")
    return lines


def _losses() -> list[str]:
    lines = ["## Policy losses: `actor_rollout_ref.actor.policy_loss.loss_mode`\n", f"{_rules(policy_losses)}\n"]
    for twins, row in _by_function(names.POLICY_LOSSES.values()):
        needs = ["the log-probs of the rollout, in bypass mode"] if row.bypass else []
        needs += ["a look at the whole mini-batch before its step"] if row.of_mini_batch else []
        needs += ["a random number for each token, the same wherever its row lies"] if row.draws else []
        lines += _entry(twins, row, needs, "actor")
    return lines


def _tables() -> list[str]:
    forms = names.KL_PENALTIES | {name: f"{text} (a function only)" for name, text in names.KL_FROM_LOGITS.items()}
    return [
        *_table("How tokens are weighed: `actor_rollout_ref.actor.loss_agg_mode`", names.LOSS_AGG_MODES),
        "Counts are those of the mini-batch over all micro-batches and ranks, so that no mode depends on how a",
        "mini-batch was divided or padded. The horizon is `loss_scale_factor`, or else `data.max_response_length`.\n",
        *_table("Forms of the KL: `algorithm.kl_penalty`, `actor_rollout_ref.actor.kl_loss_type`", forms),
        "The log ratio is log pi - log pi_ref of the sampled token.\n",
        *_table("Coefficient of the KL in the reward: `algorithm.kl_ctrl.type`", names.KL_CONTROLLERS),
        "## Rollout correction: `algorithm.rollout_correction`\n",
        "`rollout_is: token` or `sequence` weighs tokens by the probability under the trainer over that under the",
        "rollout engine; `rollout_is_threshold` cuts the weights, or as `lo_hi` sets those outside to 0;",
        "`rollout_is_batch_normalize` makes their mean 1. `rollout_rs` rejects what went too far, one or several of",
        f"{', '.join(f'`{name}`' for name in REJECTIONS)}, each with its `rollout_rs_threshold`.\n",
    ]


def _entry(twins: Iterable[str], row: Any, needs: list[str], section: str) -> list[str]:
    settings = ", ".join(f"`{section}.{name}`" for name in sorted(row.settings or ()))
    facts = {
        "Formula": f"`{row.formula}`",
        "Paper": row.paper,
        "Needs": "; ".join(needs),
        "Settings": settings,
        "When": row.when,
    }
    lines = [f"- {name}: {text}" for name, text in facts.items() if text]
    return [f"### {', '.join(f'`{name}`' for name in twins)}\n", f"{_sentence(row.summary)}\n", *lines, ""]


def _by_function(rows: Iterable[Any]) -> list[tuple[list[str], Any]]:
    """Rows with the names under which the same function is known."""
    twins: dict[str | Callable[..., Any], list[Any]] = defaultdict(list)
    for row in rows:
        twins[row.function].append(row)
    return [([row.name for row in same], same[0]) for same in twins.values()]


def _rules(package: Any) -> str:
    """What the docstring of a package says after its first paragraph: the rules for all of its functions."""
    return (inspect.getdoc(package) or "").partition("\n\n")[2]


def _table(title: str, rows: dict[str, str]) -> list[str]:
    lines = [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in rows.items()]
    return [f"## {title}\n", "| | |", "|---|---|", *lines, ""]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
