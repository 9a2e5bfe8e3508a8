"""The bridge between the driver's padded rectangles and the workers' jagged rows.

The driver keeps prompts left-padded to L and responses right-padded to R; models run only on real tokens. Both
directions are a handful of gathers over flat positions, computed once and shared by all columns.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from protocol import jagged
from protocol import tensordict_utils as tu
from protocol.errors import BatchMismatchError, FieldMissingError

_DROPPED = ("attention_mask", "prompts", "responses")  # all in input_ids, or implied by the row lengths


def left_right_2_no_padding(td: TensorDict) -> TensorDict:
    """Padded batch -> jagged rows holding attended tokens only.

    Takes `input_ids`, `attention_mask`, `position_ids` (B, T), with the response in the last R of T positions, and
    `responses` or `response_mask` (B, R), which says what R is.

    Returns a TensorDict of batch size [B]: columns of width T become jagged (B, t_i); columns of width R, trailing
    dimensions allowed, become jagged (B, r_i); `response_lens` (B,) int64 holds r_i and non-tensor `max_response_len`
    R. `attention_mask`, `prompts` and `responses` are dropped, everything else passes through. Columns of one kind
    share their offsets, so they can be added to one another.

    Raises BatchMismatchError naming the row where no prompt token is attended, or where attention to the response has
    a hole (the way back would move the tokens behind it).
    """
    attention = tu.need(td, "attention_mask").bool()  # (B, T)
    width = _response_width(td)
    total = attention.shape[1]
    real = attention[:, total - width :]  # (B, R)
    response_lens = real.sum(1)
    _check_rows(attention, real, response_lens)

    whole = _flatten_plan(attention, attention.sum(1))
    answer = _flatten_plan(real, response_lens)
    source = {}
    for key, entry in tu.entries(td):
        if key in _DROPPED:
            continue
        by_width = isinstance(entry, Tensor) and not entry.is_nested and entry.dim() > 1
        plan = {total: whole, width: answer}.get(entry.shape[1]) if by_width else None
        if plan is not whole and key in ("input_ids", "position_ids"):
            raise BatchMismatchError(f"{key!r} has shape {tuple(entry.shape)}; attention_mask {tuple(attention.shape)}")
        source[key] = entry if plan is None else _flatten(entry, plan)
    result = TensorDict({**source, "response_lens": response_lens}, batch_size=[len(attention)], device=td.device)
    return result.set_non_tensor("max_response_len", width)


def no_padding_2_padding(tensor: Tensor, data: TensorDict | int) -> Tensor:
    """Jagged (B, r_i, ...) -> (B, R, ...), zero on the right, dtype kept, differentiable.

    `data` is R, or the TensorDict that `left_right_2_no_padding` made, whose `response_lens` are then held against the
    rows. Raises BatchMismatchError naming the first row that does not fit.
    """
    values, offsets, dim = jagged.parts_of(tensor)
    if dim != 1:
        raise BatchMismatchError(f"only (B, r_i, ...) can be padded; this tensor is ragged in dimension {dim}")
    lengths = offsets.diff()
    if isinstance(data, int):
        width, expected = data, lengths.clamp(max=data)
    else:
        width, expected = tu.need(data, "max_response_len"), tu.need(data, "response_lens").to(lengths.device)
    if len(expected) != len(lengths):
        raise BatchMismatchError(f"the jagged tensor has {len(lengths)} rows, response_lens {len(expected)}")
    wrong = lengths != expected
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise BatchMismatchError(
            f"row {row} has {int(lengths[row])} entries, expected {int(expected[row])} (R={width})"
        )
    rows = torch.arange(len(lengths), device=lengths.device)
    shift = torch.repeat_interleave(rows * width - offsets[:-1], lengths)
    flat = values.new_zeros(len(lengths) * width, *values.shape[1:])
    filled = flat.index_copy(0, shift + torch.arange(len(values), device=shift.device), values)
    return filled.unflatten(0, (len(lengths), width))


def _response_width(td: TensorDict) -> int:
    for key in ("responses", "response_mask"):
        if key in td.keys():  # noqa: SIM118
            return td.get(key).shape[1]
    raise FieldMissingError("neither 'responses' nor 'response_mask' is there to say how wide the response is")


def _check_rows(attention: Tensor, real: Tensor, response_lens: Tensor) -> None:
    no_prompt = attention.sum(1) == response_lens
    if bool(no_prompt.any()):
        raise BatchMismatchError(f"row {int(no_prompt.int().argmax())} has no attended prompt token")
    columns = torch.arange(real.shape[1], device=real.device)
    hole = (real != (columns < response_lens[:, None])).any(1)
    if bool(hole.any()):
        row = int(hole.int().argmax())
        raise BatchMismatchError(
            f"row {row}: attention to the response is not one run from its start: {real[row].int().tolist()}"
        )


def _flatten_plan(mask: Tensor, lengths: Tensor) -> jagged.Gather:
    return jagged.Gather(mask.reshape(-1).nonzero().flatten(), jagged.offsets_of(lengths))


def _flatten(column: Tensor, plan: jagged.Gather) -> Tensor:
    return jagged.gather_rows(jagged.Parts(column.flatten(0, 1), plan.offsets, 1), plan)
