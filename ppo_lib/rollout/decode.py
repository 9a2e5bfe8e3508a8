"""The running rows of the `hf` engine: prefill, one token for every row, finished rows out.

Nothing here knows of threads, futures or weights' arrival. What is computed depends only on the sequence of `join`,
`step` and `evict` calls, so equal sequences give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ppo_lib.errors import RolloutError
from ppo_lib.rollout.engine import FinishReason, GenerationRequest, TokenOutput
from ppo_lib.rollout.hf_model import forward_accepts
from ppo_lib.rollout.kv_cache import RowCache
from ppo_lib.rollout.sampling import RowSampling, sample
from ppo_lib.rollout.stopping import StopStrings


@dataclass(eq=False)
class Row:
    """One request while it runs.

    Args:
        request: What was asked for.
        seed: Seed of its draws.
        limit: Most tokens of its response.
        end_ids: Tokens that end it.
    """

    request: GenerationRequest
    seed: int
    limit: int
    end_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    version_min: int = -1
    version_max: int = -1

    def output(self, reason: FinishReason) -> TokenOutput:
        """What there is of the response, as the caller gets it."""
        log_probs = self.log_probs if self.request.params.logprobs else None
        return TokenOutput(self.token_ids, log_probs, reason, self.version_min, self.version_max)


@dataclass(frozen=True)
class Finished:
    """A row that left, with its response or with what went wrong."""

    row: Row
    result: TokenOutput | RolloutError


class Decoder:
    """Rows in flight over one model.

    Args:
        model: A causal language model in evaluation mode.
        max_batched_tokens: Most prompt tokens (padding included) of one forward of a prefill.
        chunked_prefill: Read a longer prompt in pieces; without it such a prompt goes through in one.
        stop_strings: Finds stop strings; None where there is no tokenizer (and no request has any).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_batched_tokens: int,
        chunked_prefill: bool,
        stop_strings: StopStrings | None,
    ) -> None:
        self._model = model
        self._device = model.device
        self._vocab = model.config.get_text_config().vocab_size
        self._max_batched_tokens = max_batched_tokens
        self._chunked_prefill = chunked_prefill
        self._stop_strings = stop_strings
        self._last_only = {"logits_to_keep": 1} if forward_accepts(model, "logits_to_keep") else {}
        self._with_positions = forward_accepts(model, "position_ids")
        self._cache = RowCache()
        self._sampling: RowSampling | None = None
        self.rows: list[Row] = []
        self.version = -1

    @property
    def cache_bytes(self) -> int:
        """Memory of the key-value buffers."""
        return self._cache.nbytes()

    @torch.inference_mode()
    def join(self, rows: Sequence[Row]) -> list[Finished]:
        """Prefill these rows and draw their first tokens; equal prompts are computed once.

        Returns:
            Those that are finished with one token; the others run.
        """
        self._cache.expect(len(rows))
        finished: list[Finished] = []
        groups: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(tuple(row.request.prompt_ids), []).append(row)
        prompts = sorted(groups, key=len, reverse=True)  # stable; rows of similar length waste little padding
        while prompts:
            count = max(1, self._max_batched_tokens // len(prompts[0]))
            finished += self._prefill(prompts[:count], groups)
            prompts = prompts[count:]
        return finished

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One more token for every row. Returns the rows that this finishes."""
        self._cache.reserve()
        lengths = torch.tensor(self._cache.lengths) + 1  # (b,) with the token that is read now
        last = torch.tensor([row.token_ids[-1] for row in self.rows])
        logits = self._forward(last.unsqueeze(1), (lengths - 1).unsqueeze(1), _left_mask(lengths), self._cache)
        self._cache.advance()
        if self._sampling is None:
            self._sampling = self._sampling_of(self.rows)
        finished = self._draw(self.rows, self._sampling, logits)
        self._drop({one.row for one in finished})
        return finished

    def evict(self, request_ids: Collection[str] | None) -> list[Row]:
        """Take these rows (None: all) out, whatever state they are in."""
        gone = [row for row in self.rows if request_ids is None or row.request.request_id in request_ids]
        self._drop(set(gone))
        return gone

    def release(self) -> None:
        """Drop all rows and free the cache."""
        self.rows = []
        self._sampling = None
        self._cache.release()

    def _prefill(self, prompts: Sequence[tuple[int, ...]], groups: dict[tuple[int, ...], list[Row]]) -> list[Finished]:
        """Compute these prompts (longest first) in one cache and let their rows join."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = len(prompts[0])
        mask = _left_mask(lengths)  # (m, width)
        input_ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            input_ids[i, width - len(prompt) :] = torch.tensor(prompt)
        positions = (mask.cumsum(1) - 1).clamp_(min=0)
        cache = DynamicCache()
        piece = max(1, self._max_batched_tokens // len(prompts)) if self._chunked_prefill else width
        for begin in range(0, width, piece):
            part = slice(begin, begin + piece)
            logits = self._forward(input_ids[:, part], positions[:, part], mask[:, : begin + piece], cache)

        rows = [row for prompt in prompts for row in groups[prompt]]
        sources = [i for i, prompt in enumerate(prompts) for _ in groups[prompt]]
        finished = self._draw(rows, self._sampling_of(rows), logits[torch.tensor(sources, device=logits.device)])
        over = {one.row for one in finished}
        stay = [(row, source) for row, source in zip(rows, sources, strict=True) if row not in over]
        if stay:
            self._cache.add(cache, [len(row.request.prompt_ids) for row, _ in stay], [source for _, source in stay])
            self.rows += [row for row, _ in stay]
            self._sampling = None
        return finished

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: DynamicCache | RowCache
    ) -> torch.Tensor:
        """Logits of the last column, (b, V)."""
        options = {"position_ids": positions.to(self._device)} if self._with_positions else {}
        out = self._model(
            input_ids=input_ids.to(self._device),
            attention_mask=mask.to(self._device),
            past_key_values=cache,
            use_cache=True,
            **self._last_only,
            **options,
        )
        return out.logits[:, -1]

    def _sampling_of(self, rows: Sequence[Row]) -> RowSampling:
        return RowSampling.of(
            [row.request.params for row in rows], [row.seed for row in rows], self._vocab, self._device
        )

    def _draw(self, rows: Sequence[Row], sampling: RowSampling, logits: torch.Tensor) -> list[Finished]:
        """Append a token to each row and say which rows that ends."""
        positions = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        tokens, log_probs = sample(logits, sampling, positions)
        finished = []
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            if not math.isfinite(log_prob):
                finished.append(Finished(row, self._not_finite(row)))
                continue
            if not row.token_ids:
                row.version_min = self.version
            row.version_max = self.version
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
            reason = self._reason_to_stop(row, token)
            if reason is not None:
                finished.append(Finished(row, row.output(reason)))
        return finished

    def _reason_to_stop(self, row: Row, token: int) -> FinishReason | None:
        stop = row.request.params.stop
        if token in row.end_ids:
            return "stop"
        if stop and self._stop_strings is not None and self._stop_strings.completed_by_last(row.token_ids, stop):
            return "stop"
        return "length" if len(row.token_ids) >= row.limit else None

    def _not_finite(self, row: Row) -> RolloutError:
        return RolloutError(
            f"the model's logits for request {row.request.request_id} are not finite at token {len(row.token_ids)} of "
            f"the response (weight version {self.version}); the weights have probably diverged"
        )

    def _drop(self, gone: set[Row]) -> None:
        if not gone:
            return
        places = self._cache.remove([i for i, row in enumerate(self.rows) if row in gone])
        self.rows = [self.rows[i] for i in places]
        self._sampling = None


def _left_mask(lengths: torch.Tensor) -> torch.Tensor:
    """(b, max length) int64: 1 on the last `lengths` columns of each row."""
    width = int(lengths.max())
    return (torch.arange(width) >= width - lengths.unsqueeze(1)).long()
