"""The field table: every field of the envelope, what it looks like, and which stage of a step may write it.

Shape symbols: P prompts, B rows, L prompt width (left-padded), R response width (right-padded), T = L + R. At the
dataloader stage rows are prompts (P) and the width of `input_ids` is L; from gen on they are B and T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from protocol.errors import BatchMismatchError, FieldMissingError
from protocol.values import short

if TYPE_CHECKING:
    from protocol.envelope import DataProto

STAGES: tuple[str, ...] = (
    "dataloader",
    "gen",
    "balance",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "save_checkpoint",
    "update_weights",
    "testing",
)


@dataclass(frozen=True)
class FieldSpec:
    """One field of the envelope."""

    name: str
    where: str  # "batch" or "non_tensor"
    shape: tuple[str, ...]
    dtype: str  # torch dtype name, or "str" / "object" for a column
    stages: tuple[str, ...]  # who may write it
    needed_when: str
    doc: str
    checks: tuple[str, ...] = ()  # "required" of its stages, "mask" of 0 and 1, "policy": 0 where response_mask is 0


def _spec(name: str, shape: str, dtype: str, stages: str, needed_when: str, doc: str, checks: str = "") -> FieldSpec:
    where = "non_tensor" if dtype in ("str", "object") else "batch"
    return FieldSpec(
        name, where, tuple(shape.split()), dtype, tuple(stages.split()), needed_when, doc, tuple(checks.split())
    )


_TABLE = (
    _spec("uid", "B", "str", "dataloader", "always", "groups the rows of one prompt", "required"),
    _spec("raw_prompt", "B", "object", "dataloader", "always", "the prompt as a chat list or string"),
    _spec("data_source", "B", "object", "dataloader", "always", "data set, and so the scorer, of a row"),
    _spec("reward_model", "B", "object", "dataloader", "always", "style and ground truth of a row"),
    _spec("extra_info", "B", "object", "dataloader", "always", "what else the data set says about a row"),
    _spec("input_ids", "B T", "int64", "dataloader gen", "always", "prompt, then prompt and response", "required"),
    _spec("attention_mask", "B T", "int64", "dataloader gen", "always", "1 on real tokens", "required mask"),
    _spec("position_ids", "B T", "int64", "dataloader gen", "always", "positions of real tokens", "required"),
    _spec("prompts", "B L", "int64", "gen", "always", "left-padded prompt", "required"),
    _spec("responses", "B R", "int64", "gen", "always", "right-padded response", "required"),
    _spec("response_mask", "B R", "int64", "gen", "always", "1 on tokens the policy produced", "required mask"),
    _spec("prompt_row", "B", "int64", "gen", "rollouts dropped or added", "prompt row a rollout belongs to"),
    _spec("is_padding", "B", "bool", "balance", "rows were added", "rows of zero weight, in no metric"),
    _spec("rollout_log_probs", "B R", "float32", "gen", "rollout.calculate_log_probs", "the engine's log-probs"),
    _spec("rm_scores", "B R", "float32", "gen reward", "scored in gen or by a reward model", "scores as they came"),
    _spec("reward_baselines", "B", "float32", "gen reward", "remax", "score of the greedy response"),
    _spec(
        "token_level_scores", "B R", "float32", "reward", "always", "raw score, on the last policy token", "required"
    ),
    _spec(
        "old_log_probs", "B R", "float32", "old_log_prob", "not for one step on policy", "log-probs before the update"
    ),
    _spec(
        "sum_pi_squared", "B R", "float32", "old_log_prob", "optimal token baseline", "sum over the vocabulary of p^2"
    ),
    _spec("entropys", "B R", "float32", "old_log_prob", "until reduced to a metric", "entropy of each token"),
    _spec("ref_log_prob", "B R", "float32", "ref", "KL in reward or loss", "reference log-probs", "required"),
    _spec("values", "B R", "float32", "values", "the estimator needs a critic", "the critic's values", "required"),
    _spec(
        "token_level_rewards", "B R", "float32", "adv", "always", "scores minus beta * KL, or the scores", "required"
    ),
    _spec("rollout_is_weights", "B R", "float32", "adv", "rollout correction", "importance weights"),
    _spec("advantages", "B R", "float32", "adv", "always", "what the policy loss weighs", "required policy"),
    _spec("returns", "B R", "float32", "adv", "always", "what the critic regresses on", "required policy"),
)

FIELDS: dict[str, FieldSpec] = {spec.name: spec for spec in _TABLE}


def check_stage_output(batch: DataProto, stage: str, before_keys: set[str]) -> None:
    """Hold the batch against the table after `stage`; `before_keys` is `batch.field_names()` from before it.

    Checks that the stage wrote no listed field of another stage, that what it must write is there, and home, shape,
    dtype, finiteness and 0/1 masks of its fields. Fields that the table does not list belong to the user and pass.

    Raises BatchMismatchError (FieldMissingError for a field that is not there) naming stage, field and first bad row.
    """
    if stage not in STAGES:
        raise BatchMismatchError(f"unknown stage {stage!r}; stages are {', '.join(STAGES)}")
    fields = batch.field_names()
    for name in sorted(fields - before_keys):
        if name in FIELDS and stage not in FIELDS[name].stages:
            raise BatchMismatchError(
                f"stage {stage!r} wrote {name!r}, which belongs to {' and '.join(FIELDS[name].stages)}"
            )
    for spec in FIELDS.values():
        if stage not in spec.stages:
            continue
        if spec.name in fields:
            _check_field(spec, batch, stage)
        elif "required" in spec.checks:
            raise FieldMissingError(f"stage {stage!r} left no {spec.name!r} ({spec.doc})")


def _check_field(spec: FieldSpec, batch: DataProto, stage: str) -> None:
    label = f"after stage {stage!r}: {spec.name!r}"
    home = "batch" if spec.name in batch.tensor_keys() else "non_tensor"
    if home != spec.where:
        raise BatchMismatchError(f"{label} stands in {home}, expected {spec.where}")
    if spec.where == "non_tensor":
        _check_column(label, spec, batch.non_tensor_batch[spec.name])
    else:
        _check_tensor(label, spec, batch, stage)


def _check_column(label: str, spec: FieldSpec, column: np.ndarray) -> None:
    if spec.dtype == "str":
        for row, value in enumerate(column):
            if not isinstance(value, str):
                raise BatchMismatchError(f"{label} must hold strings, row {row} holds {short(value)}")


def _check_tensor(label: str, spec: FieldSpec, batch: DataProto, stage: str) -> None:
    tensors: Any = batch.batch
    tensor: Tensor = tensors.get(spec.name)
    expected = tuple(_sizes(batch, stage).get(symbol) for symbol in spec.shape)
    if (
        tensor.is_nested
        or tensor.dim() != len(expected)
        or any(e not in (None, s) for e, s in zip(expected, tensor.shape))
    ):
        wanted = ", ".join(symbol if size is None else f"{symbol}={size}" for symbol, size in zip(spec.shape, expected))
        raise BatchMismatchError(f"{label} has shape {tuple(tensor.shape)}, expected ({wanted})")
    if tensor.dtype != getattr(torch, spec.dtype):
        raise BatchMismatchError(f"{label} is {tensor.dtype}, expected torch.{spec.dtype}")
    if tensor.dtype.is_floating_point:
        _refuse(label, "is not finite", ~torch.isfinite(tensor), tensor)
    if "mask" in spec.checks:
        _refuse(label, "is a mask and neither 0 nor 1", (tensor != 0) & (tensor != 1), tensor)
    if "policy" in spec.checks and "response_mask" in batch.tensor_keys():
        _refuse(label, "is not 0 where response_mask is 0", (tensors.get("response_mask") == 0) & (tensor != 0), tensor)


def _refuse(label: str, fault: str, wrong: Tensor, tensor: Tensor) -> None:
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        column = f", column {where[1]}" if len(where) > 1 else ""
        raise BatchMismatchError(
            f"{label} {fault} in row {where[0]}{column}: {tensor[tuple(where)].item()} ({int(wrong.sum())} such)"
        )


def _sizes(batch: DataProto, stage: str) -> dict[str, int]:
    """What the shape symbols stand for in this batch; a symbol that nothing in the batch fixes is absent."""
    tensors: Any = batch.batch
    sizes = {"B": len(batch)}
    widths = {"input_ids": "T", "prompts": "L", "responses": "R"}
    for name, symbol in widths.items():
        if name in batch.tensor_keys() and tensors.get(name).dim() > 1:
            sizes[symbol] = tensors.get(name).shape[1]
    if stage != "dataloader" and "L" in sizes and "R" in sizes:
        sizes["T"] = sizes["L"] + sizes["R"]
    return sizes
