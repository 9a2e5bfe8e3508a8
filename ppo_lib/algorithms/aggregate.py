"""From a loss per token to the loss of a mini-batch, whatever micro-batches and ranks it was split over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ppo_lib.algorithms.masked import check_same_shape, masked_mean, masked_sum
from ppo_lib.algorithms.names import LOSS_AGG_MODES, unknown_name
from ppo_lib.errors import ConfigError


@dataclass(frozen=True)
class Denominators:
    """What the sums of one mini-batch are divided by, counted over all of its micro-batches and ranks.

    Args:
        num_tokens: tokens with response_mask 1.
        num_seqs: rows with at least one such token. A fully masked row is no sequence.
        horizon: the constant number of tokens of `seq-mean-token-sum-norm` (Dr. GRPO, arXiv:2503.20783); never the
            width of a batch, which depends on how it was padded.
    """

    num_tokens: float
    num_seqs: float
    horizon: float | None = None


def denominators_of(mask: Tensor, horizon: float | None = None) -> Denominators:
    """The denominators of a mini-batch whose every row is in `mask` (B, R)."""
    kept = mask.bool()
    return Denominators(float(kept.count_nonzero()), float(kept.any(dim=1).count_nonzero()), horizon)


def agg_loss(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, denominators: Denominators | None = None
) -> Tensor:
    """This part's contribution to the loss of its mini-batch: contributions of all parts add up to that loss.

    With m the mask, N the tokens, S the sequences and H the horizon of the mini-batch, summing over tokens t of rows i:

        token-mean                sum_it m l / N
        token-sum                 sum_it m l
        seq-mean-token-sum        sum_it m l / S
        seq-mean-token-mean       sum_i (sum_t m l / sum_t m) / S
        seq-mean-token-sum-norm   sum_it m l / (S H)

    Args:
        loss_mat: (b, R) float, one loss per token. What it holds where the mask is 0 has no influence, NaN included.
        loss_mask: (b, R) bool, int or float.
        loss_agg_mode: one of the above.
        denominators: those of the whole mini-batch; None takes this part for all of it.

    Returns:
        A scalar; 0 with zero gradient where the mask keeps nothing.

    Raises:
        ConfigError: an unknown mode, or `seq-mean-token-sum-norm` without a positive horizon.
    """
    check_same_shape(loss_mat=loss_mat, loss_mask=loss_mask)
    whole = denominators or denominators_of(loss_mask)
    if loss_agg_mode == "token-mean":
        return masked_sum(loss_mat, loss_mask) / max(whole.num_tokens, 1.0)
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask)
    if loss_agg_mode == "seq-mean-token-sum":
        return masked_sum(loss_mat, loss_mask) / max(whole.num_seqs, 1.0)
    if loss_agg_mode == "seq-mean-token-mean":
        return masked_mean(loss_mat, loss_mask, dim=1).sum() / max(whole.num_seqs, 1.0)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return masked_sum(loss_mat, loss_mask) / (max(whole.num_seqs, 1.0) * _checked_horizon(whole))
    raise unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)


def _checked_horizon(denominators: Denominators) -> float:
    if denominators.horizon is None or denominators.horizon <= 0:
        raise ConfigError(
            f"seq-mean-token-sum-norm divides by a constant horizon above 0, got {denominators.horizon}: "
            "set loss_scale_factor, or give Denominators(horizon=...), usually the longest response allowed"
        )
    return denominators.horizon
