"""What a scorer is asked about, and what it answers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppo_lib.errors import RewardError


@dataclass(frozen=True)
class RewardSample:
    """One finished response and the row of the data it answers.

    `solution_str` is the decoded response; None lets the reward manager decode `response_ids`. `columns` holds every
    object column of the row, for managers that read more than the rest of the fields.
    """

    data_source: str
    response_ids: Sequence[int]
    ground_truth: Any = None
    raw_prompt: Any = None
    extra_info: Mapping[str, Any] | None = None
    uid: str = ""
    row: int | None = None
    solution_str: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Any], response_ids: Sequence[int], solution_str: str | None = None
    ) -> RewardSample:
        """From one row's object columns as the dataset writes them: `data_source`, `reward_model`, `extra_info`, ..."""
        row = columns.get("dataset_row")
        return cls(
            data_source=columns.get("data_source") or "",
            response_ids=response_ids,
            ground_truth=(columns.get("reward_model") or {}).get("ground_truth"),
            raw_prompt=columns.get("raw_prompt"),
            extra_info=copy.deepcopy(columns.get("extra_info")),  # the rollouts of a prompt share the object
            uid=str(columns.get("uid") or ""),
            row=None if row is None else int(row),
            solution_str=solution_str,
            columns=columns,
        )

    def __str__(self) -> str:
        where = f" (dataset row {self.row})" if self.row is not None else ""
        return f"sample {self.uid or '?'}{where} of data_source {self.data_source!r}"


@dataclass(frozen=True)
class RewardResult:
    """One score and whatever else the scorer reported; `extra` becomes columns of the batch."""

    score: float
    extra: dict[str, Any] = field(default_factory=dict)


def failed(sample: RewardSample, cause: str, solution_str: str | None = None) -> RewardError:
    """The error for a sample that could not be scored. A score is never made up in its place."""
    response = solution_str if solution_str is not None else sample.solution_str
    ending = "" if response is None else f" The response ends with {response[-80:]!r}."
    return RewardError(f"cannot score {sample}: {cause}.{ending}")
