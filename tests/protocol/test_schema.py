"""The field table, and stages held against it."""

from __future__ import annotations

import pytest
import torch

from protocol import FIELDS, STAGES, BatchMismatchError, DataProto, FieldMissingError, check_stage_output

B, L, R = 2, 3, 4


def at_stage(stage: str) -> DataProto:
    """A right batch as it stands after `stage`."""
    prompts = DataProto.from_single_dict(
        {
            "input_ids": torch.ones(B, L).long(),
            "attention_mask": torch.ones(B, L).long(),
            "position_ids": torch.arange(L).expand(B, L).clone(),
            "uid": ["a", "b"],
            "data_source": ["x", "x"],
        }
    )
    if stage == "dataloader":
        return prompts
    data = prompts.select([], None)
    for name in ("input_ids", "attention_mask", "position_ids"):
        data.batch[name] = torch.ones(B, L + R).long()
    data.batch["prompts"] = torch.ones(B, L).long()
    data.batch["responses"] = torch.ones(B, R).long()
    data.batch["response_mask"] = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]])
    for spec in FIELDS.values():
        if spec.shape == ("B", "R") and spec.dtype == "float32" and STAGES.index(spec.stages[0]) <= STAGES.index(stage):
            data.batch[spec.name] = data.batch["response_mask"].float()
    data.batch["is_padding"] = torch.zeros(B, dtype=torch.bool)
    return data


def check(data: DataProto, stage: str, before: set[str] | None = None) -> None:
    check_stage_output(data, stage, data.field_names() if before is None else before)


def test_the_table_names_only_known_stages_homes_and_dtypes():
    for name, spec in FIELDS.items():
        assert name == spec.name
        assert set(spec.stages) <= set(STAGES)
        assert spec.where == ("non_tensor" if spec.dtype in ("str", "object") else "batch")
        assert spec.where == "non_tensor" or isinstance(getattr(torch, spec.dtype), torch.dtype)
        assert set(spec.checks) <= {"required", "mask", "policy"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_right_batch_passes_every_stage(stage):
    check(at_stage(stage), stage)


@pytest.mark.parametrize(
    ("stage", "name", "value", "message"),
    [
        ("gen", "responses", torch.ones(B, R + 1).long(), r"'input_ids' has shape \(2, 7\), expected \(B=2, T=8\)"),
        ("gen", "attention_mask", torch.ones(B, L + R), "'attention_mask' is torch.float32, expected torch.int64"),
        ("gen", "response_mask", torch.tensor([[1, 1, 1, 1], [1, 2, 1, 0]]), "neither 0 nor 1 in row 1, column 1: 2"),
        ("reward", "token_level_scores", torch.ones(B), r"has shape \(2,\), expected \(B=2, R=4\)"),
        ("values", "values", torch.tensor([[0.0] * R, [0, 0, 0, float("nan")]]), "not finite in row 1, column 3: nan"),
        ("ref", "ref_log_prob", torch.zeros(B, R).bfloat16(), "'ref_log_prob' is torch.bfloat16"),
        ("adv", "advantages", torch.ones(B, R), r"'advantages' is not 0 where response_mask is 0 in row 1, column 1"),
        ("balance", "is_padding", torch.zeros(B).long(), "'is_padding' is torch.int64, expected torch.bool"),
    ],
)
def test_a_wrong_tensor_is_named_with_stage_and_row(stage, name, value, message):
    data = at_stage(stage)
    data.batch[name] = value
    with pytest.raises(BatchMismatchError, match=f"after stage '{stage}': .*{message}"):
        check(data, stage)


def test_a_column_of_the_wrong_kind_or_in_the_wrong_home_is_named():
    data = at_stage("dataloader")
    data.non_tensor_batch["uid"][1] = 7
    with pytest.raises(BatchMismatchError, match="'uid' must hold strings, row 1 holds 7"):
        check(data, "dataloader")
    moved = at_stage("dataloader").select(None, ["data_source"])
    moved.batch["uid"] = torch.arange(B)
    with pytest.raises(BatchMismatchError, match="'uid' stands in batch, expected non_tensor"):
        check(moved, "dataloader")


def test_a_stage_may_not_write_a_field_of_another():
    data = at_stage("ref")
    before = data.field_names()
    data.batch["values"] = torch.zeros(B, R)
    with pytest.raises(BatchMismatchError, match="stage 'ref' wrote 'values', which belongs to values"):
        check(data, "ref", before)


def test_fields_outside_the_table_belong_to_the_user():
    data = at_stage("reward")
    before = data.field_names()
    data.batch["my_bonus"] = torch.full((B, 9), float("nan"))
    check(data, "reward", before)


@pytest.mark.parametrize(
    ("stage", "name"), [("gen", "responses"), ("adv", "returns"), ("dataloader", "uid"), ("ref", "ref_log_prob")]
)
def test_a_required_field_that_is_missing_is_named(stage, name):
    data = at_stage(stage)
    data.pop(*(([], [name]) if name == "uid" else ([name],)))
    with pytest.raises(FieldMissingError, match=f"stage '{stage}' left no '{name}'"):
        check(data, stage)


def test_an_unknown_stage_is_refused():
    with pytest.raises(BatchMismatchError, match=r"unknown stage 'generate'; stages are dataloader, gen"):
        check(at_stage("gen"), "generate")
