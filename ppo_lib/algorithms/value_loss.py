"""The clipped regression of a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_lib.algorithms.aggregate import Denominators, agg_loss, denominators_of
from ppo_lib.algorithms.masked import check_same_shape


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    denominators: Denominators | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error to the returns, taken pessimistically over a prediction that may not move far at once.

        L = 1/2 max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2)

    (arXiv:1707.06347, as implemented in its code).

    Args:
        vpreds: (b, R) float32, the critic's values now.
        returns: (b, R) float32, what they should be.
        values: (b, R) float32, the critic's values before the update.
        response_mask: (b, R) bool, int or float.
        cliprange_value: eps.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        denominators: those of the whole mini-batch; None takes this part for all of it.

    Returns:
        The loss, and the share of tokens where the clipped error was taken (`vf_clipfrac`) and the mean value
        (`vpred_mean`); all are contributions to the mini-batch.
    """
    check_same_shape(vpreds=vpreds, returns=returns, values=values, response_mask=response_mask)
    kept = response_mask.bool()
    whole = denominators or denominators_of(kept)

    vpreds = torch.where(kept, vpreds, 0)
    error = (vpreds - returns).square()
    clipped_error = (vpreds.clamp(values - cliprange_value, values + cliprange_value) - returns).square()
    loss = 0.5 * agg_loss(torch.maximum(error, clipped_error), kept, loss_agg_mode, whole)
    metrics = {
        "vf_clipfrac": agg_loss((clipped_error > error).float(), kept, "token-mean", whole),
        "vpred_mean": agg_loss(vpreds.detach(), kept, "token-mean", whole),
    }
    return loss, metrics
