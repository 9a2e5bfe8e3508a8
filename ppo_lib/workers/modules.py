"""The root modules that FSDP wraps: a packed micro-batch in, numbers for its response tokens out.

Everything that touches parameters, the output embedding included, happens inside one forward of the root module:
FSDP gathers and frees parameters in the hooks of that forward, and a parameter used outside it would be a shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ppo_lib.workers.log_probs import log_probs_and_entropy
from ppo_lib.workers.packing import PackedRows

__all__ = ["PolicyModule", "ValueModule"]


class PolicyModule(nn.Module):
    """A causal language model that returns log-probabilities of response tokens instead of logits."""

    def __init__(self, model: Any, chunk_size: int | None = None) -> None:
        """Wrap a transformers causal model; `chunk_size` bounds the positions whose logits exist at once."""
        super().__init__()
        self.model = model
        self.chunk_size = chunk_size

    def forward(
        self, rows: PackedRows, temperature: float, with_entropy: bool, with_sum_pi_squared: bool = False
    ) -> dict[str, torch.Tensor]:
        """`log_probs` and, if asked for, `entropys` and `sum_pi_squared`, all (M) float32, from one pass."""
        hidden = _response_states(self.model.base_model, rows)
        head = self.model.get_output_embeddings()
        log_probs, entropy, squared = log_probs_and_entropy(
            hidden,
            head.weight,
            getattr(head, "bias", None),
            rows.labels,
            temperature=temperature,
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
            chunk_size=self.chunk_size,
        )
        found = {"log_probs": log_probs, "entropys": entropy, "sum_pi_squared": squared}
        return {name: values for name, values in found.items() if values is not None}


class ValueModule(nn.Module):
    """A transformer with a scalar head: the value of the state before each response token."""

    def __init__(self, model: Any) -> None:
        """Wrap a transformers token classification model with one label."""
        super().__init__()
        self.model = model

    @property
    def head(self) -> nn.Linear:
        """The linear layer from a hidden state to its value."""
        return self.model.score if hasattr(self.model, "score") else self.model.classifier

    def forward(self, rows: PackedRows) -> dict[str, torch.Tensor]:
        """`values` (M) float32."""
        hidden = _response_states(self.model.base_model, rows)
        # A copy: FSDP hangs its hook on what leaves the root, and a view would be changed in place behind its back.
        return {"values": self.head(hidden).squeeze(-1).float().clone()}


def _response_states(base_model: Any, rows: PackedRows) -> torch.Tensor:
    """(M, H): last hidden states of the tokens before each response token."""
    output = base_model(
        input_ids=rows.input_ids,
        position_ids=rows.position_ids,
        attention_mask=None,  # an all-ones mask would let rows see each other
        use_cache=False,
        packed_rows=rows.layout,
    )
    return output.last_hidden_state[0].index_select(0, rows.predict)
