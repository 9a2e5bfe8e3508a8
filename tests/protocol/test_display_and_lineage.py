"""What an envelope shows, and what it remembers."""

from __future__ import annotations

import asyncio

import numpy as np
import torch
from envelopes import envelope

from protocol import DataProto, LineageEntry, stage
from protocol import tensordict_utils as tu
from protocol.lineage import current_stage


def test_the_text_shows_every_field_with_shape_dtype_and_first_row():
    text = repr(envelope(3, temperature=0.5))
    assert text.splitlines()[0] == "DataProto of 3 rows"
    for line in (
        "matrix  (3, 2)       float32  [0, 1]",
        "jagged  (3, jagged)  int64    []",
        "small   (3)          int32    0",
    ):
        assert line in text
    assert "meta_info['temperature'] = 0.5" in text


def test_the_text_stays_short_for_long_rows_and_survives_no_rows():
    long = DataProto.from_single_dict({"x": torch.arange(5000.0).view(1, -1), "u": ["word " * 1000]})
    assert len(repr(long)) < 400
    assert "DataProto of 0 rows" in repr(envelope(2)[:0])
    assert "DataProto of 0 rows" in repr(DataProto())


def test_the_table_for_notebooks_escapes_what_stands_in_the_data():
    html = DataProto.from_dict(non_tensors={"<b>": ["<script>"]}, meta_info={"a": "<i>"})._repr_html_()
    assert "<td>&lt;b&gt;</td>" in html
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert "<i>" not in html


def test_operations_are_remembered_under_the_stage_that_was_open():
    data = envelope(4)
    with stage("gen"):
        data = data.repeat(2)
        data.union(DataProto.from_dict({"responses": torch.zeros(8, 2)}))
        with stage("balance"):
            data.reorder(torch.arange(7, -1, -1))
    data.pop(["scalar"])
    assert data.lineage == (
        LineageEntry("gen", "repeat"),
        LineageEntry("gen", "union", ("responses",)),
        LineageEntry("balance", "reorder"),
        LineageEntry("", "pop", ("scalar",)),
    )
    assert data[:2].lineage == data.lineage
    assert envelope(4).lineage == ()


def test_fields_written_straight_into_the_batch_can_be_put_on_record():
    data = envelope(2)
    with stage("adv"):
        data.record("write", ["advantages"])
    assert data.lineage[-1] == ("adv", "write", ("advantages",))


def test_a_stage_ends_with_its_block_and_does_not_show_in_other_tasks():
    async def inside(name: str) -> str:
        with stage(name):
            await asyncio.sleep(0)
            return current_stage()

    async def both() -> list[str]:
        return await asyncio.gather(inside("one"), inside("two"))

    assert asyncio.run(both()) == ["one", "two"]
    assert current_stage() == ""


def test_the_summary_lists_names_shapes_dtypes_and_types_and_no_values():
    data = envelope(3, t=0.5, nested={"a": [1, "x"], "array": np.zeros((2, 3)), "flag": torch.tensor(True)})
    assert data.get_data_info().splitlines() == [
        "batch",
        "  scalar: (3) int64 cpu",
        "  matrix: (3, 2) float32 cpu",
        "  jagged: (3, jagged) int64 cpu",
        "non_tensor_batch",
        "  name: (3,) object",
        "  pair: (3,) object",
        "  small: (3,) int32",
        "meta_info",
        "  t: float",
        "  nested: dict{a: list[int, str], array: ndarray(2, 3) float64, flag: Tensor() bool}",
    ]
    assert DataProto().get_data_info().splitlines() == ["batch", "non_tensor_batch", "meta_info"]


def test_the_size_counts_dense_and_jagged_tensors_and_columns(capsys):
    data = DataProto.from_single_dict(
        {
            "x": torch.zeros(2, 2**27, dtype=torch.int8),
            "j": tu.nested_tensor_from_tensor_list(
                [torch.zeros(2**26, dtype=torch.int8), torch.zeros(2**26).to(torch.int8)]
            ),
            "c": np.zeros(2, dtype="S1"),
        }
    )
    data.print_size("before gen: ")
    assert capsys.readouterr().out == "before gen: 2 rows, tensors 0.375000 GB, object columns 0.000000 GB\n"
    DataProto.from_dict(non_tensors={"u": ["x" * 2**20]}).print_size()
    assert capsys.readouterr().out == "1 rows, tensors 0.000000 GB, object columns 0.000977 GB\n"
