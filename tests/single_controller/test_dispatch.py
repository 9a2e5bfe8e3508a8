"""The dispatch table, called as a worker group calls it: split, run on each rank's share, collect."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ppo_lib.errors import BatchMismatchError, ConfigError
from ppo_lib.single_controller import Dispatch, DispatchContext, register_dispatch_mode
from ppo_lib.single_controller.dispatch import DispatchMode, dispatch_mode, mesh_layout
from protocol import DataProto
from protocol import tensordict_utils as tu


def spread(mode, world_size, method, *args, **kwargs):
    """What a group does, with the ranks one after the other."""
    context = DispatchContext(None, world_size, "actor.compute")
    resolved = dispatch_mode(mode)
    calls = resolved.calls(context, args, kwargs)
    return resolved.collect(context, [method(*call.args, **call.kwargs) for call in calls])


def jagged(lengths, start=0):
    rows = [torch.arange(start + 10 * i, start + 10 * i + n) for i, n in enumerate(lengths)]
    return tu.nested_tensor_from_tensor_list(rows)


def jagged_batch(lengths):
    td = TensorDict(
        {
            "input_ids": jagged(lengths),
            "response_mask": tu.nested_tensor_from_tensor_list([torch.ones(n, dtype=torch.long) for n in lengths]),
            "score": torch.arange(len(lengths), dtype=torch.float32),
        },
        batch_size=[len(lengths)],
    )
    return tu.assign_non_tensor(td, temperature=0.5, tokens_per_mini_batch=[3.0, 4.0])


def rows_of(column):
    return [row.tolist() for row in column.unbind()]


def test_one_to_all_sends_the_same_and_lists_the_results():
    assert spread(Dispatch.ONE_TO_ALL, 3, lambda a, b: a + b, 1, b=2) == [3, 3, 3]


def test_all_to_all_and_dp_compute_take_one_entry_per_rank():
    for mode in (Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE):
        assert spread(mode, 2, lambda a, b: a * b, [2, 3], b=(5, 7)) == [10, 21]
        with pytest.raises(BatchMismatchError, match=r"actor.compute: argument 'b' .*2 ranks; it is 3 entries"):
            spread(mode, 2, lambda a, b: a, [1, 2], b=[1, 2, 3])
        with pytest.raises(BatchMismatchError, match="it is a int"):
            spread(mode, 2, lambda a: a, 5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_jagged_rows_come_back_in_order_whatever_the_number_of_ranks(world_size):
    lengths = [3, 1, 4, 2, 5]
    batch = jagged_batch(lengths)
    seen = []

    def double(td, factor):
        seen.append((len(td), tu.get(td, "temperature"), tu.get(td, "tokens_per_mini_batch")))
        values = td["input_ids"]
        out = torch.nested.nested_tensor_from_jagged(values.values() * factor, values.offsets())
        return TensorDict({"doubled": out, "score": td["score"] * factor}, batch_size=td.batch_size)

    result = spread(Dispatch.DP_COMPUTE_PROTO, world_size, double, batch, factor=2)
    assert rows_of(result["doubled"]) == [[2 * x for x in row] for row in rows_of(batch["input_ids"])]
    assert result["score"].tolist() == [0, 2, 4, 6, 8]
    assert seen == [(-(-len(lengths) // world_size), 0.5, [3.0, 4.0])] * world_size
    assert set(batch.keys()) == {"input_ids", "response_mask", "score", "temperature", "tokens_per_mini_batch"}


def test_ranks_get_contiguous_rows():
    shares = []

    def note(td):
        shares.append(td["score"].tolist())
        return td

    spread(Dispatch.DP_COMPUTE_PROTO, 3, note, TensorDict({"score": torch.arange(6)}, [6]))
    assert shares == [[0, 1], [2, 3], [4, 5]]


def test_padding_rows_weigh_nothing_in_a_reduced_result():
    batch = jagged_batch([3, 1, 4])
    shares = []

    def tokens(td):
        shares.append((int(td["response_mask"].values().sum()), td["is_padding"].tolist()))
        return {"actor/tokens": 0.0}

    assert spread(Dispatch.DP_COMPUTE_METRIC, 2, tokens, batch) == {"actor/tokens": 0.0}
    assert shares == [(4, [False, False]), (4, [False, True])]


def test_a_reduced_result_refuses_padding_that_would_count():
    batch = TensorDict({"score": torch.arange(3)}, [3])
    with pytest.raises(BatchMismatchError, match=r"3 rows of argument 0 .* 2 ranks.*multiple of 2 rows"):
        spread(Dispatch.DP_COMPUTE_METRIC, 2, lambda td: {}, batch)
    assert spread(Dispatch.DP_COMPUTE_METRIC, 3, lambda td: {"rows": len(td)}, batch) == {"rows": 1}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_dataproto_is_split_with_its_object_columns(world_size):
    data = DataProto.from_dict({"x": torch.arange(5)}, {"uid": np.array(list("abcde"), dtype=object)})

    def answer(part):
        y = part.batch["x"] + 100
        return DataProto.from_dict({"y": y}, {"uid": part.non_tensor_batch["uid"]})

    result = spread(Dispatch.DP_COMPUTE_PROTO, world_size, answer, data)
    assert result.batch["y"].tolist() == [100, 101, 102, 103, 104]
    assert result.non_tensor_batch["uid"].tolist() == list("abcde")


def test_a_worker_that_adds_a_column_does_not_change_the_drivers_batch():
    batch = TensorDict({"x": torch.arange(2)}, [2])
    data = DataProto.from_dict({"x": torch.arange(2)})

    def scribble(td, proto):
        td["new"] = td["x"] + 1
        proto.batch["new"] = td["x"] + 1
        return td

    spread(Dispatch.DP_COMPUTE_PROTO, 1, scribble, batch, proto=data)
    assert "new" not in batch.keys()  # noqa: SIM118
    assert "new" not in data.batch.keys()  # noqa: SIM118


def test_batches_of_different_lengths_are_refused_by_name():
    one, two = TensorDict({"x": torch.arange(2)}, [2]), TensorDict({"x": torch.arange(4)}, [4])
    with pytest.raises(BatchMismatchError, match=r"same number of rows; 0 has 2, 'other' has 4"):
        spread(Dispatch.DP_COMPUTE_PROTO, 2, lambda td, other: td, one, other=two)


def test_a_batch_without_rows_is_refused():
    with pytest.raises(BatchMismatchError, match="has no rows"):
        spread(Dispatch.DP_COMPUTE_PROTO, 2, lambda td: td, TensorDict({"x": torch.zeros(0)}, [0]))


def test_a_rank_that_returns_something_else_than_its_rows_is_named():
    batch = TensorDict({"x": torch.arange(4)}, [4])
    with pytest.raises(BatchMismatchError, match="given 2 rows each and returned 1, 1"):
        spread(Dispatch.DP_COMPUTE_PROTO, 2, lambda td: td[:1], batch)
    with pytest.raises(BatchMismatchError, match="rank 0 returned a dict"):
        spread(Dispatch.DP_COMPUTE_PROTO, 2, lambda td: {}, batch)


def test_a_mode_of_ones_own_goes_by_its_name():
    def round_robin(context, rows):
        return ([rows[rank :: context.world_size] for rank in range(context.world_size)],), {}

    def interleave(context, outputs):
        return [x for group in zip(*outputs) for x in group]

    register_dispatch_mode("round_robin", round_robin, interleave)
    register_dispatch_mode("round_robin", round_robin, interleave)  # importing a module twice is no conflict
    assert spread("round_robin", 2, lambda rows: [-x for x in rows], [1, 2, 3, 4]) == [-1, -2, -3, -4]
    with pytest.raises(ConfigError, match="'round_robin' exists already"):
        register_dispatch_mode("round_robin", interleave, round_robin)
    with pytest.raises(ConfigError, match=r"unknown dispatch mode 'robin'.*Dispatch.RANK_ZERO.*'round_robin'"):
        dispatch_mode("robin")
    assert dispatch_mode(DispatchMode(round_robin, interleave)).split is round_robin


def test_a_split_that_forgets_a_rank_is_an_error():
    mode = DispatchMode(lambda context, x: (([x],), {}), lambda context, outputs: outputs)
    with pytest.raises(BatchMismatchError, match="argument 0 was split into 1 parts for 2 ranks"):
        spread(mode, 2, lambda x: x, 1)


def test_what_the_ranks_of_a_mesh_told_gives_shares_and_who_answers():
    told = [(1, False), (0, True), (1, True), (0, False)]
    assert mesh_layout("dp", told, "actor") == ([1, 0, 1, 0], [1, 2])


@pytest.mark.parametrize("told", [[(0, False), (1, True)], [(0, True), (0, True)], [(0, True), (2, True)]])
def test_a_mesh_needs_every_data_parallel_rank_and_one_that_collects(told):
    with pytest.raises(ConfigError, match="exactly one rank of each must collect"):
        mesh_layout("dp", told, "actor")
