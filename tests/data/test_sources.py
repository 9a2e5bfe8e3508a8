"""Files become rows, or one message that names the file and the place in it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from data_testing import data_config, row

from ppo_lib.data import open_data, open_rows
from ppo_lib.errors import DataError

KINDS = ("data.parquet", "data.jsonl", "data.json")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_rows(write, name):
    rows = open_rows(write(name, [row(0), row(1)]))
    assert len(rows) == 2
    assert rows[1] == row(1)
    assert rows.column("prompt") == ["0:", "1:"]
    assert rows.where(1).endswith(f"{name}, row 1")


def test_json_may_also_hold_an_object_a_line_and_jsonl_blank_lines(write):
    assert open_rows(write("a.json", '{"prompt": "a"}\n{"prompt": "b"}\n')).column("prompt") == ["a", "b"]
    assert open_rows(write("b.jsonl", '\ufeff{"prompt": "a"}\n\n  \n{"prompt": "b"}')).column("prompt") == ["a", "b"]
    assert open_rows(write("c.json", '\n [{"prompt": "a\u2028b"}]')).column("prompt") == ["a\u2028b"]
    assert len(open_rows(write("d.jsonl", '{"prompt": "a\u2028b"}\n'))) == 1  # only \n ends a line


def test_several_files_count_on_and_a_column_that_one_lacks_is_none_there(write):
    rows = open_rows([write("a.parquet", [row(0)]), write("b.jsonl", [row(1, more=[1, 2]), row(2)])])
    assert len(rows) == 3
    assert rows.column("more") == [None, [1, 2], None]
    assert rows[2]["prompt"] == "2:"
    assert rows.where(0).endswith("a.parquet, row 0")
    assert rows.where(2).endswith("b.jsonl, row 1")


def test_a_row_is_the_callers_to_change(write):
    for name in KINDS:
        rows = open_rows(write(name, [row(0)]))
        rows[0]["extra_info"]["index"] = "changed"
        assert rows[0]["extra_info"]["index"] == 0


def test_a_path_under_home_is_found(write, tmp_path, monkeypatch):
    write("a.jsonl", [row(0)])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_rows("~/a.jsonl")) == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("e.parquet", b"", "e.parquet is empty: 0 bytes"),
        ("e.jsonl", "\n", "e.jsonl is empty: it has no rows"),
        ("e.json", "[]", "e.json is empty: it has no rows"),
        ("d.parquet", b"PAR1 this is no table PAR1", "d.parquet cannot be read; it may be damaged"),
        ("d.jsonl", b"\xff\xfe\x00", "d.jsonl cannot be read; it may be damaged"),
        ("d.jsonl", '{"prompt": "a"}\n{"prompt": ', "d.jsonl, line 2: not valid JSON"),
        ("d.json", '[{"prompt": "a"},\n{]', "d.json, line 2: not valid JSON"),
        ("l.jsonl", '{"prompt": "a"}\n\n["b"]\n', "l.jsonl, line 3: expected an object with named columns, found list"),
        ("l.json", '["b"]', "l.json, row 0: expected an object with named columns, found str"),
        ("t.csv", "a,b", "unknown kind of data file '.csv'; expected .parquet, .json or .jsonl"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(write, name, content, said):
    with pytest.raises(DataError) as caught:
        open_rows(write(name, content))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_parquet_file_damaged_behind_a_whole_footer_is_named(write, tmp_path):
    path = write("d.parquet", [row(i) for i in range(50)])
    with open(path, "r+b") as file:
        file.seek(4)
        file.write(b"\xff" * 200)
    with pytest.raises(DataError, match=r"d\.parquet cannot be read; it may be damaged"):
        open_rows(path).column("prompt")


def test_missing_files_folders_and_no_files(tmp_path):
    with pytest.raises(DataError, match=r"the data file .*absent\.parquet does not exist"):
        open_rows(str(tmp_path / "absent.parquet"))
    with pytest.raises(DataError, match="is a folder"):
        open_rows(str(tmp_path))
    with pytest.raises(DataError, match="no data files given"):
        open_rows([])


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_column_is_named_with_those_that_are_there(write, name):
    path = write(name, [{"promt": "a", "data_source": "s"}])
    with pytest.raises(
        DataError, match=rf"{name} has no column 'prompt'; it has promt, data_source; did you mean 'promt'"
    ):
        open_data(path, data_config(), is_train=True)


def test_opening_files_loads_no_torch(write):
    path = write("a.parquet", [row(0)])
    program = f"import sys, ppo_lib.data as d; d.open_rows({path!r}, ['prompt']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
