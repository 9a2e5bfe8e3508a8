"""What every policy loss begins and ends with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_lib.algorithms.aggregate import Denominators, agg_loss
from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.masked import check_same_shape, log_ratio


@dataclass(frozen=True)
class Tokens:
    """The tokens of a micro-batch; all tensors (b, R), and 0 off the mask."""

    log_prob: Tensor
    advantages: Tensor
    log_r: Tensor
    kept: Tensor
    whole: Denominators
    loss_agg_mode: str
    weights: Tensor | None

    @classmethod
    def of(
        cls,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: LossConfig,
        rollout_is_weights: Tensor | None = None,
    ) -> Tokens:
        """Check the arguments of a policy loss and keep what the mask keeps.

        `log_r` is log_prob - old_log_prob, clamped; the gradient goes through log_prob alone.
        """
        optional = {} if rollout_is_weights is None else {"rollout_is_weights": rollout_is_weights}
        check_same_shape(
            old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask, **optional
        )
        kept = response_mask.bool()
        return cls(
            log_prob=torch.where(kept, log_prob, 0),
            advantages=torch.where(kept, advantages, 0),
            log_r=log_ratio(log_prob, old_log_prob.detach(), kept),
            kept=kept,
            whole=config.denominators_for(kept),
            loss_agg_mode=loss_agg_mode,
            weights=rollout_is_weights,
        )

    def loss(self, losses: Tensor, weighted: bool = True) -> Tensor:
        """The loss of the micro-batch from those of its tokens (b, R), `weighted` by the importance weights if any."""
        if weighted and self.weights is not None:
            losses = losses * self.weights
        return agg_loss(losses, self.kept, self.loss_agg_mode, self.whole)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the tokens of the mini-batch of `values` (b, R), bool or float: this part's contribution."""
        return agg_loss(values.detach().to(self.log_prob.dtype), self.kept, "token-mean", self.whole)

    def metrics(self, clipped: Tensor | None = None, clipped_lower: Tensor | None = None) -> dict[str, Tensor]:
        """`pg_clipfrac` and `pg_clipfrac_lower`, shares of tokens (None: there are none), and `ppo_kl`, mean -log_r."""
        none = torch.zeros_like(self.kept)
        return {
            "pg_clipfrac": self.mean(none if clipped is None else clipped),
            "pg_clipfrac_lower": self.mean(none if clipped_lower is None else clipped_lower),
            "ppo_kl": self.mean(-self.log_r),
        }
