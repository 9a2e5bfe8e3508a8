"""Generations as text, for people: one JSON line a rollout, one file a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol import DataProto


def decode_rollouts(batch: DataProto, tokenizer: Any) -> list[tuple[str, str]]:
    """The (prompt, response) texts of every row, padding left out, special tokens kept."""
    width = batch.batch["responses"].shape[1]
    ids, attended = batch.batch["input_ids"], batch.batch["attention_mask"].bool()
    prompts = [row[keep].tolist() for row, keep in zip(ids[:, :-width], attended[:, :-width])]
    responses = [row[keep].tolist() for row, keep in zip(ids[:, -width:], attended[:, -width:])]
    return list(zip(tokenizer.batch_decode(prompts), tokenizer.batch_decode(responses)))


def dump_generations(directory: str | Path, step: int, samples: list[dict[str, Any]]) -> Path:
    """Write `{directory}/{step}.jsonl`, one sample a line; values JSON cannot hold are written as text."""
    path = Path(directory).expanduser() / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps({"step": step, **sample}, ensure_ascii=False, default=str) + "\n")
    return path
