"""How far the trainer's log-probs of the sampled tokens stand from those of the rollout engine."""

from __future__ import annotations

import torch
from torch import Tensor


def rollout_diff_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Absolute difference of token probabilities, and their Pearson correlation, over policy tokens only.

    All three (B, R). An undefined correlation (fewer than two tokens, or constant probabilities) is left out.
    """
    mask = response_mask.bool()
    ours, theirs = old_log_probs[mask].double().exp(), rollout_log_probs[mask].double().exp()
    if ours.numel() == 0:
        return {}
    diff = (ours - theirs).abs()
    metrics = {
        "training/rollout_probs_diff_max": diff.max().item(),
        "training/rollout_probs_diff_mean": diff.mean().item(),
        "training/rollout_probs_diff_std": diff.std(correction=0).item(),
    }
    if ours.numel() > 1 and ours.std() > 0 and theirs.std() > 0:
        metrics["training/rollout_actor_probs_pearson_corr"] = torch.corrcoef(torch.stack([ours, theirs]))[0, 1].item()
    return metrics
