"""The bridge between padded rectangles and jagged rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from protocol import BatchMismatchError, FieldMissingError, left_right_2_no_padding, no_padding_2_padding
from protocol import tensordict_utils as tu

L, R = 3, 4


def padded(lengths: list[tuple[int, int]], prompt_width: int = L, response_width: int = R) -> TensorDict:
    """Rows of (prompt, response) lengths, tokens numbered so that each says row, part and place."""
    prompt_at, response_at = torch.arange(prompt_width), torch.arange(response_width)
    p, r = torch.tensor(lengths).T[:, :, None]
    prompt_mask, response_mask = (prompt_at >= prompt_width - p).long(), (response_at < r).long()
    rows = torch.arange(len(lengths))[:, None] * 100
    prompts, responses = (
        (rows + 1 + prompt_at - (prompt_width - p)) * prompt_mask,
        (rows + 50 + response_at) * response_mask,
    )
    mask = torch.cat([prompt_mask, response_mask], 1)
    td = TensorDict(
        {
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "prompts": prompts,
            "responses": responses,
            "response_mask": response_mask,
            "old_log_probs": -responses.float(),
            "mini_batch": torch.arange(len(lengths)),
        },
        batch_size=[len(lengths)],
    )
    return tu.assign_non_tensor_stack(tu.assign_non_tensor(td, temperature=0.5), "uid", list(range(len(lengths))))


def rows(td: TensorDict, key: str) -> list:
    return [row.tolist() for row in td[key].unbind()]


def test_only_attended_tokens_are_left():
    td = left_right_2_no_padding(padded([(1, 4), (3, 0), (2, 2)]))
    assert rows(td, "input_ids") == [[1, 50, 51, 52, 53], [101, 102, 103], [201, 202, 250, 251]]
    assert rows(td, "position_ids") == [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1, 2, 3]]
    assert rows(td, "old_log_probs") == [[-50, -51, -52, -53], [], [-250, -251]]
    assert rows(td, "response_mask") == [[1, 1, 1, 1], [], [1, 1]]
    assert td["response_lens"].tolist() == [4, 0, 2]
    assert td["response_lens"].dtype == torch.int64
    assert td["mini_batch"].tolist() == [0, 1, 2]
    assert (tu.get(td, "max_response_len"), tu.get(td, "temperature"), tu.get(td, "uid")) == (R, 0.5, [0, 1, 2])
    assert {"attention_mask", "prompts", "responses"}.isdisjoint(td.keys())
    assert td.batch_size == (3,)


def test_columns_of_one_width_can_be_added_to_one_another():
    td = left_right_2_no_padding(padded([(1, 4), (3, 0)]))
    assert (td["old_log_probs"] * td["response_mask"]).values().tolist() == [-50, -51, -52, -53]
    assert (td["input_ids"] - td["position_ids"]).shape[0] == 2


def test_tool_tokens_inside_a_response_stay_as_masked_entries():
    source = padded([(1, 4)])
    source["response_mask"][0, 1:3] = 0
    assert rows(left_right_2_no_padding(source), "response_mask") == [[1, 0, 0, 1]]


def test_trailing_dimensions_of_a_response_column_are_kept():
    source = padded([(1, 2), (2, 4)])
    source["topk"] = torch.arange(2 * R * 3).view(2, R, 3)
    td = left_right_2_no_padding(source)
    assert [tuple(row.shape) for row in td["topk"].unbind()] == [(2, 3), (4, 3)]
    assert no_padding_2_padding(td["topk"], td)[0, :2].tolist() == source["topk"][0, :2].tolist()


def test_the_response_width_is_taken_from_response_mask_where_responses_are_gone():
    td = left_right_2_no_padding(padded([(1, 2)]).exclude("responses"))
    assert tu.get(td, "max_response_len") == R
    with pytest.raises(FieldMissingError, match="how wide"):
        left_right_2_no_padding(padded([(1, 2)]).exclude("responses", "response_mask"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, L), st.integers(0, R)), min_size=1, max_size=6),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_more_padding_changes_nothing_and_the_way_back_restores_the_rectangle(lengths, left, right):
    source = padded(lengths)
    tight, wide = left_right_2_no_padding(source), left_right_2_no_padding(padded(lengths, L + left, R + right))
    for key in ("input_ids", "position_ids", "old_log_probs", "response_mask"):
        assert rows(tight, key) == rows(wide, key)
    for key in ("old_log_probs", "response_mask"):
        back = no_padding_2_padding(tight[key], tight)
        assert back.dtype == source[key].dtype
        assert torch.equal(back, source[key])
        assert torch.equal(no_padding_2_padding(wide[key], R + right)[:, :R], source[key])


def test_the_way_back_carries_gradients():
    td = left_right_2_no_padding(padded([(1, 2), (1, 1)]))
    values = torch.ones(3, requires_grad=True)
    no_padding_2_padding(
        torch.nested.nested_tensor_from_jagged(values, offsets=td["old_log_probs"].offsets()), td
    ).sum().backward()
    assert values.grad.tolist() == [1, 1, 1]


def _without_prompt(td):
    td["attention_mask"][1, :L] = 0


def _hole(td):
    td["attention_mask"][1, L] = 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_without_prompt, BatchMismatchError, "row 1 has no attended prompt token"),
        (_hole, BatchMismatchError, r"row 1: attention to the response.*\[0, 1, 0, 0\]"),
        (lambda td: td.del_("attention_mask"), FieldMissingError, "'attention_mask'"),
        (
            lambda td: td.set("position_ids", torch.zeros(2, 9)),
            BatchMismatchError,
            r"'position_ids' has shape \(2, 9\)",
        ),
    ],
)
def test_a_batch_that_cannot_be_bridged_is_refused_with_its_row(change, error, message):
    td = padded([(1, 2), (2, 2)])
    change(td)
    with pytest.raises(error, match=message):
        left_right_2_no_padding(td)


def test_rows_that_do_not_belong_to_the_batch_are_refused():
    td = left_right_2_no_padding(padded([(1, 2), (1, 3)]))
    wrong = tu.nested_tensor_from_tensor_list([torch.zeros(2), torch.zeros(1)])
    with pytest.raises(BatchMismatchError, match="row 1 has 1 entries, expected 3"):
        no_padding_2_padding(wrong, td)
    with pytest.raises(BatchMismatchError, match="row 0 has 2 entries, expected 1"):
        no_padding_2_padding(wrong, 1)
    with pytest.raises(BatchMismatchError, match="has 1 rows, response_lens 2"):
        no_padding_2_padding(tu.nested_tensor_from_tensor_list([torch.zeros(2)]), td)
    with pytest.raises(FieldMissingError, match="max_response_len"):
        no_padding_2_padding(wrong, TensorDict({}, batch_size=[2]))
