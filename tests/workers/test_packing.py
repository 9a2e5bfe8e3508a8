from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from workers_testing import padded_batch, worker_batch

from ppo_lib.errors import BatchMismatchError, ConfigError, FieldMissingError
from ppo_lib.workers.packing import JaggedRows, MicroBatching, filler_rows, pack_rows, plan_micro_batches
from protocol import tensordict_utils as tu

CPU = torch.device("cpu")


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=40), cap=st.integers(50, 200), at_least=st.integers(0, 6))
def test_token_cap_is_never_exceeded_and_every_row_is_there_once(lengths: list[int], cap: int, at_least: int) -> None:
    plan = plan_micro_batches(lengths, MicroBatching(max_tokens=cap), at_least)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= cap for rows in plan)
    assert len(plan) >= at_least
    # two micro-batches at most half full would fit into one, so the number is within a factor of two of the least
    assert len(plan) <= max(at_least, 2 * -(-sum(lengths) // cap))


def test_rows_spread_evenly_over_as_few_micro_batches_as_fit() -> None:
    plan = plan_micro_batches([5, 9, 1, 1, 8, 4], MicroBatching(max_tokens=16))
    assert [sum([5, 9, 1, 1, 8, 4][row] for row in rows) for rows in plan] == [14, 14]


def test_a_number_of_micro_batches_that_even_spreading_misses_is_still_reached() -> None:
    lengths = [2, 6, 1, 9, 5, 3, 4]  # exactly three times 10, and spreading longest first ends at 11
    plan = plan_micro_batches(lengths, MicroBatching(max_tokens=10))
    assert [sum(lengths[row] for row in rows) for rows in plan] == [10, 10, 10]


def test_row_above_the_token_cap_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"row 1 has 21 tokens.*max_token_len_per_gpu 20"):
        plan_micro_batches([3, 21, 4], MicroBatching(max_tokens=20))


def test_fixed_rows_are_taken_in_order_and_the_last_may_be_short() -> None:
    plan = plan_micro_batches([4, 4, 2, 9, 1], MicroBatching(rows=2), at_least=4)
    assert plan == [[0, 1], [2, 3], [4], []]


def test_sizes_are_read_as_typed() -> None:
    assert MicroBatching.from_sizes(dynamic=False, rows=4, max_tokens=100) == MicroBatching(rows=4)
    assert MicroBatching.from_sizes(dynamic=True, rows=4, max_tokens=100) == MicroBatching(max_tokens=100)
    assert MicroBatching.from_sizes(dynamic=False, rows=None, max_tokens=100) == MicroBatching(max_tokens=100)


def test_on_a_cpu_a_micro_batch_is_no_larger_than_helps() -> None:
    large, cuda = MicroBatching(max_tokens=16384), torch.device("cuda")
    assert large.on(CPU, longest=100, training=True) == MicroBatching(max_tokens=2048)
    assert large.on(CPU, longest=100, training=False) == MicroBatching(max_tokens=4608)
    assert large.on(CPU, longest=5000, training=True) == MicroBatching(max_tokens=5000)
    assert large.on(CPU, longest=20000, training=True) == large
    assert MicroBatching(max_tokens=100).on(CPU, longest=20, training=False) == MicroBatching(max_tokens=100)
    assert large.on(cuda, longest=100, training=True) == large
    assert MicroBatching(rows=8).on(CPU, longest=5000, training=True) == MicroBatching(rows=8)


def test_packed_row_holds_tokens_positions_labels_and_their_places() -> None:
    td = TensorDict(
        {
            "input_ids": tu.nested_tensor_from_tensor_list(
                [torch.tensor([11, 12, 13]), torch.tensor([21, 22, 23, 24])]
            ),
            "position_ids": tu.nested_tensor_from_tensor_list([torch.arange(3), torch.arange(4)]),
            "response_lens": torch.tensor([1, 3]),
        },
        batch_size=[2],
    )
    packed = pack_rows(JaggedRows(td), [1, 0], CPU)
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 23]]  # the last tokens, 13 and 24, predict nothing
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert packed.layout.lengths == (2, 3)
    assert packed.layout.cu_seqlens.tolist() == [0, 2, 5]
    assert packed.labels.tolist() == [22, 23, 24, 13]
    assert packed.predict.tolist() == [2, 3, 4, 1]  # the outputs before 22, 23, 24 and 13
    assert packed.flat_index.tolist() == [1, 2, 3, 0]
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    assert packed.to_rows(flat).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert packed.gather(torch.tensor([0.5, 1.5, 2.5, 3.5])).tolist() == [[1.5, 2.5, 3.5], [0.5, 0, 0]]
    packed.to_rows(flat).square().sum().backward()
    assert flat.grad.tolist() == [2, 4, 6, 8]


def test_rows_of_one_prompt_hold_it_once() -> None:
    rows = [[7, 8, 11, 12], [7, 8, 21], [7, 9, 31, 32, 33], [7, 8, 41, 42, 43]]
    td = TensorDict(
        {
            "input_ids": tu.nested_tensor_from_tensor_list([torch.tensor(row) for row in rows]),
            "position_ids": tu.nested_tensor_from_tensor_list([torch.arange(len(row)) for row in rows]),
            "response_lens": torch.tensor([2, 1, 3, 3]),
        },
        batch_size=[4],
    )
    batch = JaggedRows(td)
    assert batch.prompts == [(0, 2), (0, 2), (1, 2), (0, 2)]
    packed = pack_rows(batch, [0, 1, 2, 3], CPU)
    assert packed.layout.lengths == (2, 4, 0, 1, 2)
    assert packed.layout.prefixes == (-1, -1, 0, 0, 0)
    assert packed.input_ids.tolist() == [[7, 8, 7, 9, 31, 32, 11, 41, 42]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 2, 2, 3]]
    assert packed.labels.tolist() == [11, 12, 21, 31, 32, 33, 41, 42, 43]
    assert packed.predict.tolist() == [1, 6, 1, 3, 4, 5, 1, 7, 8]
    assert packed.flat_index.tolist() == list(range(9))


def test_a_prompt_at_other_positions_is_another_prompt() -> None:
    positions = [[0, 1, 2], [1, 2, 3]]
    td = TensorDict(
        {
            "input_ids": tu.nested_tensor_from_tensor_list([torch.tensor([7, 8, 9])] * 2),
            "position_ids": tu.nested_tensor_from_tensor_list([torch.tensor(row) for row in positions]),
            "response_lens": torch.tensor([1, 1]),
        },
        batch_size=[2],
    )
    assert JaggedRows(td).prompts == [(0, 2), (1, 2)]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), max_size=40),
    cap=st.integers(50, 200),
    at_least=st.integers(0, 6),
)
def test_a_shared_prompt_counts_once_towards_the_cap(rows: list[tuple[int, int]], cap: int, at_least: int) -> None:
    prompts = [(prompt, 4 * prompt + 1) for prompt, _ in rows]
    lengths = [own + length for (_, own), (_, length) in zip(rows, prompts)]
    plan = plan_micro_batches(lengths, MicroBatching(max_tokens=cap), at_least, prompts)
    assert sorted(row for part in plan for row in part) == list(range(len(rows)))
    assert len(plan) >= at_least
    for part in plan:
        tokens = sum(rows[row][1] for row in part) + sum(4 * prompt + 1 for prompt in {rows[row][0] for row in part})
        assert tokens <= cap


def test_rows_of_one_prompt_stay_together_as_far_as_the_cap_allows() -> None:
    prompts = [(0, 10), (1, 10), (0, 10), (1, 10), (0, 10)]
    plan = plan_micro_batches([15] * 5, MicroBatching(max_tokens=20), prompts=prompts)
    assert plan == [[0, 2], [1, 3], [4]]


def test_rows_without_a_response_are_packed_and_predict_nothing() -> None:
    td = TensorDict(
        {
            "input_ids": tu.nested_tensor_from_tensor_list([torch.tensor([5, 6]), torch.tensor([7, 8, 9])]),
            "position_ids": tu.nested_tensor_from_tensor_list([torch.arange(2), torch.arange(3)]),
            "response_lens": torch.tensor([0, 2]),
        },
        batch_size=[2],
    )
    packed = pack_rows(JaggedRows(td), [0, 1], CPU)
    assert packed.labels.tolist() == [8, 9]
    assert packed.to_rows(torch.tensor([1.0, 2.0])).tolist() == [[0, 0], [1, 2]]


def test_filler_is_one_prediction_that_no_column_of_the_batch_holds() -> None:
    packed = filler_rows(CPU)
    assert packed.input_ids.shape == (1, 2)
    assert len(packed.labels) == 1
    assert len(packed.flat_index) == 0


def test_batches_that_do_not_fit_are_errors_naming_row_and_field() -> None:
    td = worker_batch(padded_batch(4))
    with pytest.raises(FieldMissingError, match="'values'"):
        JaggedRows(td).column("values")
    td["advantages"] = td["position_ids"]
    with pytest.raises(BatchMismatchError, match=r"row 0 of 'advantages' has \d+ entries, its response"):
        JaggedRows(td).column("advantages")
    td["response_lens"] = td["position_ids"].offsets().diff()
    with pytest.raises(BatchMismatchError, match=r"row 0 .* needs at least one prompt token"):
        JaggedRows(td)
