"""A dataset item is what the first stage of a step expects, and a bad row is found when the dataset is made."""

from __future__ import annotations

import pytest
import torch
from data_testing import data_config, row

from ppo_lib.data import RLHFDataset, collate_fn, create_rl_dataset
from ppo_lib.data.prompts import truncate
from ppo_lib.errors import ConfigError, DataError
from ppo_lib.models import load_tokenizer
from protocol import DataProto

CHAT = [{"role": "user", "content": "ab"}]


def test_an_item_is_left_padded_with_positions_from_its_first_token(write, tokenizer):
    dataset = RLHFDataset(write("a.parquet", [row(7, other=[1, 2])]), tokenizer, data_config(max_prompt_length=5))
    item = dataset[0]
    pad = tokenizer.pad_token_id
    assert item["input_ids"].tolist() == [pad, pad, pad, *tokenizer("7:").input_ids]
    assert item["attention_mask"].tolist() == [0, 0, 0, 1, 1]
    assert item["position_ids"].tolist() == [0, 0, 0, 0, 1]
    assert {item[key].dtype for key in ("input_ids", "attention_mask", "position_ids")} == {torch.int64}
    assert item["raw_prompt"] == "7:"
    assert item["dataset_row"] == 0
    assert item["other"] == [1, 2]
    assert item["reward_model"] == {"style": "rule", "ground_truth": "7"}
    assert "prompt" not in item


def test_a_batch_of_items_makes_an_envelope(write, tokenizer):
    dataset = RLHFDataset(
        write("a.jsonl", [row(0, tags=["x", "y"]), row(1, tags=["z", "w"])]), tokenizer, data_config()
    )
    batch = DataProto.from_single_dict(collate_fn([dataset[0], dataset[1]]))
    assert batch.batch["input_ids"].shape == (2, 8)
    assert batch.non_tensor_batch["tags"].shape == (2,)  # equal lengths stay a column of lists
    assert batch.non_tensor_batch["tags"][1] == ["z", "w"]
    assert batch.non_tensor_batch["dataset_row"].tolist() == [0, 1]


def test_chats_go_through_the_template_with_its_arguments(write, tokenizer):
    path = write("a.parquet", [row(0, prompt=CHAT)])
    item = RLHFDataset(path, tokenizer, data_config(max_prompt_length=32))[0]
    text = tokenizer.decode(item["input_ids"][item["attention_mask"].bool()])
    assert text == "user: ab\nassistant: "
    assert item["raw_prompt"] == CHAT

    config = data_config(max_prompt_length=32, apply_chat_template_kwargs={"add_generation_prompt": False})
    item = RLHFDataset(path, tokenizer, config)[0]
    assert tokenizer.decode(item["input_ids"][item["attention_mask"].bool()]) == "user: ab\n"

    thinking = load_tokenizer("builtin:tiny-llama", custom_chat_template="{{ messages[0].content }}{{ mark }}")
    config = data_config(apply_chat_template_kwargs={"mark": "!"})
    item = RLHFDataset(path, thinking, config)[0]
    assert tokenizer.decode(item["input_ids"][item["attention_mask"].bool()]) == "ab!"


def test_keys_that_parquet_fills_with_null_do_not_reach_the_template(write):
    tokenizer = load_tokenizer(
        "builtin:tiny-llama",
        custom_chat_template="{% for m in messages %}{% if m.name is defined %}N{% endif %}{{ m.content }}{% endfor %}",
    )
    chat = [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "u"}]
    item = RLHFDataset(write("a.parquet", [row(0, prompt=chat)]), tokenizer, data_config())[0]
    assert tokenizer.decode(item["input_ids"][item["attention_mask"].bool()]) == "Nsu"
    assert item["raw_prompt"] == chat


def test_string_prompts_get_the_special_tokens_of_the_tokenizer(write, tokenizer):
    from tokenizers.processors import TemplateProcessing

    base = load_tokenizer("builtin:tiny-llama")
    base.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", base.bos_token_id)]
    )
    path = write("a.jsonl", [row(7), row(8, prompt=CHAT)])
    dataset = RLHFDataset(path, base, data_config(max_prompt_length=32))
    assert dataset[0]["input_ids"][-3:].tolist() == [base.bos_token_id, *tokenizer("7:").input_ids]
    assert base.bos_token_id not in dataset[1]["input_ids"].tolist()  # a chat template writes its own


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (None, "column 'prompt' is null"),
        ("", "column 'prompt' is an empty string"),
        ([], "column 'prompt' is an empty list of messages"),
        ([{"content": "x"}], "column 'prompt' has a message 0 without a role"),
        ([{"role": "user", "content": None}], "column 'prompt' has a message 0 whose content is null"),
        (5, "column 'prompt' is a int"),
    ],
)
def test_a_bad_prompt_is_named_with_file_and_row(write, tokenizer, bad, said):
    rows = [row(0, prompt=CHAT), row(1, prompt=CHAT), row(2)]
    rows[2]["prompt"] = bad
    with pytest.raises(DataError) as caught:
        RLHFDataset(write("bad.jsonl", rows), tokenizer, data_config(max_prompt_length=64))
    assert said in str(caught.value)
    assert "bad.jsonl, row 2" in str(caught.value)


def test_a_null_prompt_in_parquet_is_named_with_its_row(write, tokenizer):
    rows = [row(0), row(1), row(2)]
    rows[1]["prompt"] = None
    with pytest.raises(DataError, match=r"bad\.parquet, row 1: column 'prompt' is null"):
        RLHFDataset(write("bad.parquet", rows), tokenizer, data_config())


def test_a_null_source_a_reserved_column_and_images_are_refused(write, tokenizer):
    with pytest.raises(DataError, match=r"row 1: column 'data_source' is None; expected a name"):
        RLHFDataset(write("a.jsonl", [row(0), row(1, data_source=None)]), tokenizer, data_config())
    with pytest.raises(DataError, match=r"row 1: 'reward_model' is a str; expected named values"):
        RLHFDataset(write("d.jsonl", [row(0), row(1, reward_model="{}")]), tokenizer, data_config())
    with pytest.raises(DataError, match="column 'input_ids' has a name that training writes"):
        RLHFDataset(write("b.jsonl", [row(0, input_ids=[1])]), tokenizer, data_config())


@pytest.mark.parametrize(
    ("key", "column"), [("image_key", "pictures"), ("video_key", "videos"), ("audio_key", "audios")]
)
def test_images_videos_and_sounds_are_refused_by_name_or_carried_unread(write, tokenizer, key, column):
    path = write("c.jsonl", [row(0, **{column: []}), row(1, **{column: ["a"]})])
    kind = key.removesuffix("_key")
    with pytest.raises(
        DataError, match=rf"row 1: column '{column}' \(data\.{key}\) is not empty, and training on {kind}s"
    ):
        RLHFDataset(path, tokenizer, data_config(**{key: column}))
    carried = RLHFDataset(path, tokenizer, data_config(**{key: None}))
    assert [carried[0][column], carried[1][column]] == [[], ["a"]]
    assert len(RLHFDataset(write("e.jsonl", [row(0, **{column: None})]), tokenizer, data_config(**{key: column}))) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image"}], "a message 0 with a part of type 'image', and only text"),
        (["a"], "a message 0 with a part of type 'str'"),
        (3, "a message 0 whose content is a int; expected text"),
    ],
)
def test_a_message_that_is_not_text_is_refused(write, tokenizer, content, says):
    path = write("m.jsonl", [row(0, prompt=[{"role": "user", "content": content}])])
    with pytest.raises(DataError, match=f"row 0: column 'prompt' has {says}"):
        RLHFDataset(path, tokenizer, data_config())


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_a_template_that_renders_nothing_is_found_before_a_row_is_drawn(write, truncation):
    tokenizer = load_tokenizer(
        "builtin:tiny-llama", custom_chat_template="{% if messages[0].content == 'b' %}x{% endif %}"
    )
    path = write("t.jsonl", [row(i, prompt=[{"role": "user", "content": text}]) for i, text in enumerate("ba")])
    with pytest.raises(DataError, match=r"row 1: column 'prompt' is rendered to nothing by the chat template"):
        RLHFDataset(path, tokenizer, data_config(truncation=truncation))


def test_a_tokenizer_without_pad_token_is_refused(write):
    bare = load_tokenizer("builtin:tiny-llama")
    bare.pad_token = None
    with pytest.raises(DataError, match=r"no pad token; .*load_tokenizer"):
        RLHFDataset(write("a.jsonl", [row(0)]), bare, data_config())


def test_a_chat_without_template_or_refused_by_it_is_named(write):
    bare = load_tokenizer("builtin:tiny-llama")
    bare.chat_template = None
    path = write("a.jsonl", [row(0), row(1, prompt=CHAT)])
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: .*no chat template; set .*custom_chat_template"):
        RLHFDataset(path, bare, data_config())
    strict = load_tokenizer("builtin:tiny-llama", custom_chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: .*refused by the chat template: .*roles must alternate"):
        RLHFDataset(path, strict, data_config())


def lengths_file(write, lengths):
    return write("long.jsonl", [row(i, prompt="x" * length) for i, length in enumerate(lengths)])


@pytest.mark.parametrize("workers", [0, 1, 3, 99])
def test_overlong_prompts_are_left_out_and_said_how_many_and_why(write, tokenizer, caplog, workers):
    config = data_config(filter_overlong_prompts=True, filter_overlong_prompts_workers=workers)
    dataset = RLHFDataset(lengths_file(write, [3, 9, 8, 20, 1]), tokenizer, config)
    assert [dataset[i]["dataset_row"] for i in range(len(dataset))] == [0, 2, 4]  # row numbers are those of the file
    assert dataset.num_filtered == 2
    assert dataset.column("prompt") == ["xxx", "x" * 8, "x"]
    assert dataset.where(1).endswith("long.jsonl, row 2")
    assert "left out 2 of 5 prompts, longer than data.max_prompt_length=8 tokens (the longest has 20)" in caplog.text


def test_nothing_is_said_when_nothing_is_left_out(write, tokenizer, caplog):
    config = data_config(filter_overlong_prompts=True)
    assert len(RLHFDataset(lengths_file(write, [3, 8]), tokenizer, config)) == 2
    assert caplog.text == ""


def test_all_prompts_filtered_is_an_error_with_the_lengths(write, tokenizer):
    with pytest.raises(DataError, match=r"long\.jsonl: all 2 prompts are longer than .*=8 tokens \(from 9 to 20\)"):
        RLHFDataset(lengths_file(write, [20, 9]), tokenizer, data_config(filter_overlong_prompts=True))


def test_an_overlong_prompt_stops_at_load_where_it_may_not_be_cut(write, tokenizer):
    with pytest.raises(DataError) as caught:
        RLHFDataset(lengths_file(write, [3, 9, 20]), tokenizer, data_config(truncation="error"))
    for part in ("long.jsonl, row 1", "9 tokens", "2 of 3", "longest has 20", "filter_overlong_prompts", "truncation"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("side", "kept"), [("left", "56789"), ("right", "01234"), ("middle", "01789")])
def test_truncation(write, tokenizer, side, kept):
    path = write("a.jsonl", [row(0, prompt="0123456789"), row(1, prompt="01")])
    dataset = RLHFDataset(path, tokenizer, data_config(max_prompt_length=5, truncation=side))
    assert tokenizer.decode(dataset[0]["input_ids"]) == kept
    assert dataset[0]["attention_mask"].tolist() == [1] * 5
    assert dataset[1]["attention_mask"].tolist() == [0, 0, 0, 1, 1]


def test_truncation_keeps_exactly_the_width_and_knows_its_words():
    assert truncate([1, 2, 3], 1, "middle") == [3]
    assert truncate([1, 2, 3, 4], 2, "middle") == [1, 4]
    with pytest.raises(ValueError, match="unknown side 'error'"):
        truncate([1, 2, 3], 2, "error")


def test_max_samples_takes_the_first_rows_or_a_seeded_choice(write, tokenizer):
    path = write("a.jsonl", [row(i) for i in range(50)])

    def chosen(is_train=True, max_samples=10, **settings):
        return RLHFDataset(path, tokenizer, data_config(**settings), max_samples=max_samples, is_train=is_train).kept

    assert chosen(shuffle=False) == list(range(10))
    drawn = chosen(shuffle=True, seed=1)
    assert drawn == sorted(drawn) == chosen(shuffle=True, seed=1)
    assert len(set(drawn)) == 10
    assert drawn != list(range(10))
    assert drawn != chosen(shuffle=True, seed=2)
    assert chosen(is_train=False, shuffle=True) == list(range(10))  # validation follows its own switch
    assert chosen(is_train=False, shuffle=False, validation_shuffle=True, seed=1) == drawn
    assert chosen(max_samples=-1) == chosen(max_samples=50) == chosen(max_samples=99) == list(range(50))
    with pytest.raises(DataError, match="max_samples is 0"):
        chosen(max_samples=0)


def test_max_samples_counts_before_overlong_prompts_are_left_out(write, tokenizer):
    config = data_config(filter_overlong_prompts=True, shuffle=False)
    dataset = RLHFDataset(lengths_file(write, [9, 1, 2, 3]), tokenizer, config, max_samples=3)
    assert dataset.kept == [1, 2]


def test_other_key_names_and_absent_optional_columns(write, tokenizer):
    path = write("a.jsonl", [{"question": "1:", "kind": "k"}])
    item = RLHFDataset(path, tokenizer, data_config(prompt_key="question", reward_fn_key="kind"))[0]
    assert (item["raw_prompt"], item["data_source"], item["reward_model"], item["extra_info"]) == ("1:", "k", {}, {})
    assert "question" not in item


def test_files_with_different_columns_give_items_with_the_same_keys(write, tokenizer):
    dataset = RLHFDataset([write("a.jsonl", [row(0)]), write("b.jsonl", [row(1, more=1)])], tokenizer, data_config())
    assert dataset[0].keys() == dataset[1].keys()
    assert (dataset[0]["more"], dataset[1]["more"]) == (None, 1)


CUSTOM = """
from ppo_lib.data import RLHFDataset

class Loud(RLHFDataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.asked = (data_files, max_samples)
        super().__init__(data_files, tokenizer, config, processor, max_samples)

    def __getitem__(self, index):
        return {**super().__getitem__(index), "loud": True}

class Split(RLHFDataset):
    pass

not_a_class = 3
"""


def test_a_dataset_class_of_the_users_own(write, tokenizer):
    path = write("mine.py", CUSTOM)
    config = data_config(custom_cls={"path": path, "name": "Loud"}, max_prompt_length=32)
    dataset = create_rl_dataset("builtin:arithmetic", config, tokenizer, is_train=False, max_samples=5)
    assert dataset.asked == (["builtin:arithmetic/validation"], 5)
    assert dataset[0]["loud"]
    assert len(dataset) == 5

    config = data_config(custom_cls={"path": path, "name": "Split"}, max_prompt_length=32, validation_shuffle=True)
    dataset = create_rl_dataset("builtin:arithmetic", config, tokenizer, is_train=False, max_samples=5)
    assert dataset.kept != list(range(5))  # it was told that it is for validation


def test_a_dataset_class_that_is_not_there_or_none_is_refused(write, tokenizer):
    path = write("mine.py", CUSTOM)
    broken = write("broken.py", "import os\n\nx = 1 / 0\n")
    for custom, said in (
        ({"path": path, "name": "Lod"}, "has no 'Lod'; did you mean 'Loud'"),
        ({"path": path, "name": "not_a_class"}, "is no dataset"),
        ({"path": path}, r"data\.custom_cls\.name is not set"),
        ({"name": "Loud"}, r"data\.custom_cls\.path is not set"),
        ({"path": path + "x", "name": "Loud"}, "there is no file"),
        ({"path": broken, "name": "Loud"}, r"broken\.py, line 3 failed: ZeroDivisionError"),
        ({"path": "pkg://no_such_module_here", "name": "Loud"}, "cannot import"),
    ):
        with pytest.raises(ConfigError, match=said):
            create_rl_dataset("builtin:arithmetic", data_config(custom_cls=custom), tokenizer)


def test_collate_refuses_tensors_that_do_not_stack_and_fills_missing_keys():
    assert collate_fn([{"a": 1}, {"b": [2]}])["a"].tolist() == [1, None]
    with pytest.raises(
        DataError, match=r"cannot stack 'x': row 0 holds torch.float32 \(2,\), row 1 holds torch.float32 \(3,\)"
    ):
        collate_fn([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}])
    with pytest.raises(DataError, match=r"cannot stack 'x': .* row 1 holds a NoneType"):
        collate_fn([{"x": torch.zeros(2)}, {}])
