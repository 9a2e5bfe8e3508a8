"""GSM8K as the parquet files that training reads, where the hub that holds it can be reached."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ppo_lib.errors import DataError

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SOLUTION = re.compile(r"#### (-?[0-9.,]+)")


def gsm8k_row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """One row from GSM8K's `question` and `answer`; the number after `####`, without commas, is the ground truth."""
    found = SOLUTION.search(example["answer"])
    if found is None:
        raise DataError(f"{HUB_NAME}, {split}, row {index}: the answer has no '#### number'.")
    return {
        "data_source": HUB_NAME,
        "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": found.group(1).replace(",", "")},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": example["answer"],
            "question": example["question"],
        },
    }


def prepare_gsm8k(out: str | Path) -> list[Path]:
    """Download GSM8K and write `train.parquet` (7473 rows) and `test.parquet` (1319) into `out`; returns the paths.

    Raises `DataError` if the package `datasets` is missing, the hub cannot be reached, or `out` cannot be written.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError("preparing GSM8K needs the package datasets: pip install datasets") from error
    try:
        loaded = datasets.load_dataset(HUB_NAME, "main")
    except Exception as error:  # the hub client raises errors of several packages
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"cannot download {HUB_NAME} from the Hugging Face hub: {said}") from error
    return [
        write_parquet(
            [gsm8k_row(example, split, index) for index, example in enumerate(loaded[split])],
            Path(out).expanduser() / f"{split}.parquet",
        )
        for split in ("train", "test")
    ]


def write_parquet(rows: list[dict[str, Any]], path: Path) -> Path:
    """Write `rows` to `path`, its folder included."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    return path
