"""Files: what comes back, what is refused, and that nothing in a file is executed."""

from __future__ import annotations

import base64
import datetime
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from envelopes import dtypes_of, envelope, rows_of
from test_wire_format import DTYPES

from protocol import DataProto, FileFormatError, NotStorableError, fold_batch_dim, stage
from protocol import tensordict_utils as tu
from protocol.values import deep_equal


def through_file(data: DataProto, folder: Path) -> DataProto:
    data.save_to_disk(folder / "data")
    return DataProto.load_from_disk(folder / "data")


def test_an_envelope_comes_back_as_it_was_in_writable_memory(tmp_path):
    with stage("gen"):
        data = envelope(3, temperature=0.5, array=np.arange(2)).repeat(2)
    data.auto_padding = True
    back = through_file(data, tmp_path)
    assert rows_of(back) == rows_of(data)
    assert dtypes_of(back) == dtypes_of(data)
    assert list(back.batch.keys()) == list(data.batch.keys())
    assert (back.lineage, back.auto_padding) == (data.lineage, True)
    for array in (
        back.batch["matrix"],
        back.batch["jagged"].values(),
        back.non_tensor_batch["small"],
        back.meta_info["array"],
    ):
        array[0] = -1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit_also_without_rows_and_without_width(tmp_path, dtype):
    full = torch.tensor([[0.0, 1.0, 2.5]] * 2).to(dtype)
    for rows in (2, 0):
        data = DataProto.from_dict({"full": full[:rows], "empty": full[:rows, :0]})
        back = through_file(data, tmp_path)
        for key, tensor in data.batch.items():
            assert (back.batch[key].dtype, back.batch[key].shape) == (dtype, tensor.shape)
            assert torch.equal(back.batch[key].view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_plain_python_values_come_back_with_their_types(tmp_path):
    value = {
        "plain": [None, True, -1, 2**80, 0.5, float("inf"), "text\ud800", b"\x00\xff"],
        "nested": ({"a": (1, [2])}, {3, 4}, frozenset("x"), {}),
        ("a", 1): {1: "int key"},
        "scalars": [np.float32(1.5), np.int8(-3), np.str_("s"), np.bool_(True), np.datetime64("2020-01-01")],
        "arrays": [np.arange(6, dtype=">i2").reshape(2, 3), np.array([]), np.array([[None, {"x": 1}]], dtype=object)],
        "tensors": [torch.ones(2).bfloat16(), tu.nested_tensor_from_tensor_list([torch.ones(1), torch.ones(2)])],
        "tag": {"tuple": [1]},
    }
    back = through_file(DataProto.from_dict(non_tensors={"u": [value, None]}, meta_info={"m": value}), tmp_path)
    for got in (back.non_tensor_batch["u"][0], back.meta_info["m"]):
        assert deep_equal(got, value)
        assert [type(entry) for entry in got["scalars"]] == [type(entry) for entry in value["scalars"]]
        assert type(got["nested"]) is tuple
        assert [array.dtype for array in got["arrays"]] == [array.dtype for array in value["arrays"]]
    assert np.isnan(through_file(DataProto(meta_info={"n": float("nan")}), tmp_path).meta_info["n"])


@pytest.mark.parametrize(
    "dtype", ["<U3", "S2", "datetime64[ns]", "complex128", "bool", [("x", "i1"), ("y", "<f4")]], ids=str
)
def test_columns_of_every_numpy_dtype_come_back(tmp_path, dtype):
    for rows in (2, 0):
        column = np.zeros(rows, dtype=dtype)
        back = through_file(DataProto.from_dict(non_tensors={"c": column}), tmp_path).non_tensor_batch["c"]
        assert back.dtype == column.dtype
        assert back.tolist() == column.tolist()


def test_two_dimensions_and_arrays_that_are_shared_come_back_so(tmp_path):
    image = np.ones((50, 50))
    data = DataProto.from_dict({"x": torch.zeros(4)}, {"u": [image] * 4})
    back = through_file(fold_batch_dim(data, 2), tmp_path)
    assert back.non_tensor_batch["u"].shape == (2, 2)
    assert back.non_tensor_batch["u"][0, 0] is back.non_tensor_batch["u"][1, 1]
    assert (tmp_path / "data").stat().st_size < 2 * image.nbytes


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (
            lambda: DataProto.from_dict(non_tensors={"u": [1, {"k": [object()]}]}),
            r"non_tensor_batch\['u'\]\[1\]\['k'\]\[0\] is a builtins.object",
        ),
        (lambda: DataProto(meta_info={"when": datetime.date(2020, 1, 1)}), r"meta_info\['when'\] is a datetime.date"),
        (lambda: DataProto(meta_info={"f": len}), r"meta_info\['f'\] is a builtins.builtin_function"),
        (
            lambda: DataProto(meta_info={"d": {datetime.date(2020, 1, 1): 1}}),
            r"a key of meta_info\['d'\] is a datetime.date",
        ),
        (
            lambda: DataProto(meta_info={"a": np.zeros(1, dtype=[("x", object)])}),
            r"meta_info\['a'\] is an array of dtype",
        ),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name_and_no_file_is_left_or_touched(tmp_path, data, where):
    file = tmp_path / "data"
    file.write_bytes(b"what was there")
    with pytest.raises(NotStorableError, match=where):
        data().save_to_disk(file)
    assert file.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    file = tmp_path / "data"
    envelope(2).save_to_disk(file)
    before = file.read_bytes()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        envelope(3).save_to_disk(tmp_path / "folder")
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "absent")
    assert file.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"data", "folder"}


class Evil:
    """Its pickle would write a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def rewritten(file: Path, change: Any) -> None:
    with safetensors.safe_open(file, framework="numpy") as opened:
        metadata, arrays = opened.metadata(), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    structure = json.loads(arrays["structure"].tobytes())
    change(structure, arrays, metadata)
    arrays["structure"] = np.frombuffer(json.dumps(structure).encode(), dtype=np.uint8)
    safetensors.numpy.save_file(arrays, file, metadata=metadata)


def shifted(structure: Any, arrays: Any, metadata: Any) -> None:
    """Offsets of the jagged column that point past its values."""
    for key, array in arrays.items():
        if array.tobytes() == np.array([0, 0, 1, 3]).tobytes():
            arrays[key] = np.frombuffer(np.array([0, 0, 1, 10**6]).tobytes(), dtype=np.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, a, m: m.update(format="other"), "has format 'other'"),
        (lambda s, a, m: a.pop("0"), "'0'"),
        (lambda s, a, m: a.update({"0": a["0"][:-1]}), "bytes are no tensor"),
        (lambda s, a, m: s.pop("batch"), "'batch'"),
        (lambda s, a, m: s["rest"].update(meta_info={"_class__": 1}), "_class__"),
        (lambda s, a, m: s["rest"].update(meta_info={"list": [1]}), "meta_info must be a dict, found"),
        (shifted, "are no offsets into 3 entries"),
        (lambda s, a, m: s["rest"].pop("non_tensor_batch"), "non_tensor_batch"),
        (
            lambda s, a, m: s["rest"].update(non_tensor_batch={"dict": [["u", {"objects": [[9], [None] * 9]}]]}),
            "'u' has 9 rows",
        ),
        *[
            (lambda s, a, m, plain=plain: s["rest"].update(meta_info={"dict": [["x", plain]]}), "made of bytes")
            for plain in (
                {"array": ["|O", [1], "0"]},
                {"array": [[["f", "<i8"], ["g", "|O"]], [1], "0"]},
                {"scalar": ["|O", "QUFBQUFBQUE="]},
            )
        ],
    ],
)
def test_a_file_that_was_tampered_with_is_refused(tmp_path, change, message):
    file = tmp_path / "data"
    envelope(3).save_to_disk(file)
    rewritten(file, change)
    with pytest.raises(FileFormatError, match=message):
        DataProto.load_from_disk(file)


def test_pickles_truncated_files_and_other_files_are_refused_and_nothing_runs(tmp_path):
    file, target = tmp_path / "data", tmp_path / "executed"
    file.write_bytes(pickle.dumps(Evil(target)))
    with pytest.raises(FileFormatError, match="it is a pickle"):
        DataProto.load_from_disk(file)
    assert not target.exists()
    envelope(3).save_to_disk(file)
    whole = file.read_bytes()
    for cut in (0, 4, 100, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(FileFormatError, match="not a whole file"):
            DataProto.load_from_disk(file)


@pytest.mark.parametrize("part", ["python", "tensors", "inner", "block"])
def test_a_pickle_inside_a_file_is_not_loaded(tmp_path, part):
    file, target = tmp_path / "data", tmp_path / "executed"
    envelope(3).save_to_disk(file)
    pickled = {"bytes": base64.b64encode(pickle.dumps(Evil(target))).decode()}

    def put_in(structure: Any, arrays: Any, metadata: Any) -> None:
        items = structure["batch"]["dict"]
        items[[key for key, _ in items].index(part)][1] = pickled
        structure["rest"]["meta_info"] = {"dict": [["note", pickled]]}  # which is nothing but bytes

    rewritten(file, put_in)
    try:
        assert type(DataProto.load_from_disk(file).meta_info["note"]) is bytes
    except FileFormatError:
        assert part != "block"  # which no place in the file refers to
    assert not target.exists()


def test_a_folder_that_is_not_there_and_a_value_that_holds_itself_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*absent is not there"):
        envelope(1).save_to_disk(tmp_path / "absent" / "data")
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(NotStorableError, match="nested too deeply"):
        DataProto.from_dict(non_tensors={"u": [deep]}).save_to_disk(tmp_path / "data")
    endless: list = []
    endless.append(endless)
    with pytest.raises(NotStorableError, match="holds itself"):
        DataProto(meta_info={"m": endless}).save_to_disk(tmp_path / "data")
    assert not list(tmp_path.iterdir())
