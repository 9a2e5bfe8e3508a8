"""What people do to a TensorDict of rows, on dense, jagged and non-tensor entries alike (imported as `tu`).

Entries in and out stand in `entries`, choosing and joining rows in `td_rows`, comparing and uniting in `td_merge`.
"""

from __future__ import annotations

from protocol.entries import (
    COLUMN_DTYPES,
    assign_non_tensor,
    assign_non_tensor_data,
    assign_non_tensor_stack,
    column_of,
    entries,
    get,
    get_keys,
    get_non_tensor_data,
    get_tensordict,
    list_of_dict_to_tensordict,
    need,
    pop,
    pop_keys,
    stack_of,
    unwrap_non_tensor_data,
)
from protocol.jagged import nested_tensor_from_tensor_list
from protocol.td_merge import assert_tensordict_eq, union_tensor_dict
from protocol.td_rows import (
    append_padding,
    chunk_tensordict,
    concat_nested_tensors,
    concat_tensordict,
    contiguous,
    index_select_tensor_dict,
    make_iterator,
    minibatch_rows,
    pad_to_divisor,
    row_index,
    take_rows,
    unpad,
)

__all__ = [
    "COLUMN_DTYPES",
    "append_padding",
    "assert_tensordict_eq",
    "assign_non_tensor",
    "assign_non_tensor_data",
    "assign_non_tensor_stack",
    "chunk_tensordict",
    "column_of",
    "concat_nested_tensors",
    "concat_tensordict",
    "contiguous",
    "entries",
    "get",
    "get_keys",
    "get_non_tensor_data",
    "get_tensordict",
    "index_select_tensor_dict",
    "list_of_dict_to_tensordict",
    "make_iterator",
    "minibatch_rows",
    "need",
    "nested_tensor_from_tensor_list",
    "pad_to_divisor",
    "pop",
    "pop_keys",
    "row_index",
    "stack_of",
    "take_rows",
    "union_tensor_dict",
    "unpad",
    "unwrap_non_tensor_data",
]
