"""Validation: generate with `rollout.val_kwargs`, score, and reduce by data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from ppo_lib.trainer.metrics import process_validation_metrics, validation_metric_names
from protocol import DataProto


class ValidationLog:
    """Collects scored rollouts batch by batch and reduces them to `val-core/...` and `val-aux/...`."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.uids: list[str] = []
        self.turns: list[int] = []
        self.infos: dict[str, list[Any]] = defaultdict(list)
        self.samples: list[dict[str, Any]] = []

    def add(self, batch: DataProto, extra: dict[str, np.ndarray], texts: Iterable[tuple[str, str]]) -> None:
        """Take one batch of rollouts with `token_level_scores`; `texts` are its (prompt, response) pairs."""
        scores = batch.batch["token_level_scores"].sum(dim=-1).tolist()
        seen = len(self.sources)
        self.sources += [str(s) for s in batch.non_tensor_batch.get("data_source", ["unknown"] * len(scores))]
        self.uids += list(batch.non_tensor_batch["uid"])
        self.turns += [int(t) for t in batch.non_tensor_batch.get("__num_turns__", ())]
        for name in extra.keys() - self.infos.keys() - {"reward"}:  # a key that earlier batches did not have
            self.infos[name] = [None] * seen
        self.infos["reward"] += scores
        for name, values in self.infos.items():
            if name != "reward":
                values += list(extra[name]) if name in extra else [None] * len(scores)
        for (prompt, response), score in zip(texts, scores):
            self.samples.append({"input": prompt, "output": response, "score": score})

    def metrics(self) -> dict[str, float]:
        """The reduced metrics under their dashboard names."""
        if not self.sources:
            return {}
        reduced = process_validation_metrics(self.sources, self.uids, self.infos)
        metrics = validation_metric_names(reduced)
        if self.turns:
            turns = np.array(self.turns)
            metrics |= {
                f"val-aux/num_turns/{n}": float(f(turns))
                for n, f in (("min", np.min), ("max", np.max), ("mean", np.mean))
            }
        return metrics
