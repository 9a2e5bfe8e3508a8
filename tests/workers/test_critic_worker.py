from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification
from workers_testing import (
    PROMPT_WIDTH,
    RESPONSE_WIDTH,
    Gradients,
    config,
    new_critic,
    padded,
    padded_batch,
    worker_batch,
)


def plain_values(path: Path, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """(B, R) values before each response token, on padded rows."""
    model = AutoModelForTokenClassification.from_pretrained(path, attn_implementation="eager")
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
    ).logits
    return logits[:, -RESPONSE_WIDTH - 1 : -1, 0], model


def test_values_and_update_are_those_of_the_regression_written_out(tiny_model: str, tmp_path: Path) -> None:
    critic = new_critic(config(tiny_model, "critic.grad_clip=null", "critic.ppo_micro_batch_size_per_gpu=2"))
    critic.save_checkpoint(str(tmp_path), 0)  # the drawn head, so that transformers can read it too
    batch = padded_batch(8)
    td = worker_batch(batch, mini_batches=1)
    attended = batch["attention_mask"][:, PROMPT_WIDTH:].bool()
    now, model = plain_values(tmp_path / "huggingface", batch)
    values = padded(critic.compute_values(td)["values"], td)
    assert (values - now)[attended].abs().max() <= 1e-5
    assert now[attended].std() > 0.1

    td["values"] = critic.compute_values(td)["values"] + td["noise"]
    old, mask = padded(td["values"], td), batch["response_mask"].bool()
    clipped = torch.minimum(torch.maximum(now, old - 0.5), old + 0.5)
    errors = torch.maximum((now - batch["returns"]).square(), (clipped - batch["returns"]).square())
    loss = 0.5 * errors[mask].sum() / mask.sum()
    loss.backward()
    recorded = Gradients(critic.critic.engine)
    metrics = critic.update_critic(td)
    assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic/vpred_mean"] == pytest.approx(now[mask].mean().item(), rel=1e-5)
    assert 0 < metrics["critic/vf_clipfrac"] < 1
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (recorded.seen[0] - gradient).norm() <= 1e-5 * gradient.norm()


def test_critic_learns_returns(tiny_model: str) -> None:
    critic = new_critic(config(tiny_model, "critic.cliprange_value=100"))
    td = worker_batch(padded_batch(8), mini_batches=2)
    losses = []
    for _ in range(15):
        td["values"] = critic.compute_values(td)["values"]
        losses.append(critic.update_critic(td)["critic/vf_loss"])
    assert losses[-1] < 0.3 * losses[0]


def test_learning_rate_follows_its_schedule_in_optimizer_steps(tiny_model: str) -> None:
    schedule = ("critic.optim.lr_scheduler_type=linear", "critic.optim.lr_warmup_steps=2", "critic.optim.lr=1.0e-3")
    critic = new_critic(config(tiny_model, *schedule), steps=10)
    td = worker_batch(padded_batch(4), mini_batches=1)
    td["values"] = critic.compute_values(td)["values"]
    rates = [critic.update_critic(td)["critic/lr"] for _ in range(5)]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 8.75e-4, 7.5e-4])
