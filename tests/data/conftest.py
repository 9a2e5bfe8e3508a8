from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo_lib.models import load_tokenizer


@pytest.fixture
def write(tmp_path):
    """Write rows as the kind of file that the name says; returns the path."""

    def write(name: str, rows: Any) -> str:
        path = Path(tmp_path) / name
        if isinstance(rows, (str, bytes)):
            path.write_bytes(rows.encode() if isinstance(rows, str) else rows)
        elif path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        else:
            path.write_text(json.dumps(rows))
        return str(path)

    return write


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer("builtin:tiny-llama")
