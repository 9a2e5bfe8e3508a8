"""GSM8K rows are what the field's launch scripts expect, and go through the dataset and the scorer."""

from __future__ import annotations

import importlib.util

import pytest
from data_testing import data_config

from ppo_lib.data import RLHFDataset, open_rows, prepare_gsm8k
from ppo_lib.data.gsm8k import gsm8k_row, write_parquet
from ppo_lib.errors import DataError
from ppo_lib.reward import default_compute_score

EXAMPLE = {"question": "How much is it?", "answer": "It is 600 + 600 = <<600+600=1200>>1,200.\n#### 1,200"}


def test_a_row_has_the_fields_of_the_field_and_its_own_answer_scores_one(tmp_path, tokenizer):
    path = write_parquet([gsm8k_row(EXAMPLE, "train", 3)], tmp_path / "deeper" / "train.parquet")
    row = open_rows(str(path))[0]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert row["extra_info"]["index"] == 3
    assert row["prompt"][0]["content"].startswith("How much is it? Let's think step by step")
    assert default_compute_score(row["data_source"], EXAMPLE["answer"], "1200") == {"score": 1.0, "acc": 1.0}
    item = RLHFDataset(str(path), tokenizer, data_config(max_prompt_length=256))[0]
    assert item["raw_prompt"] == row["prompt"]


def test_an_answer_without_a_number_is_named():
    with pytest.raises(DataError, match="test, row 9: the answer has no '#### number'"):
        gsm8k_row({"question": "?", "answer": "none"}, "test", 9)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        write_parquet([gsm8k_row(EXAMPLE, "train", 0)], tmp_path / "file" / "train.parquet")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed: it would download")
def test_without_the_package_datasets_it_says_what_to_install(tmp_path):
    with pytest.raises(DataError, match="pip install datasets"):
        prepare_gsm8k(tmp_path)
    assert list(tmp_path.iterdir()) == []
