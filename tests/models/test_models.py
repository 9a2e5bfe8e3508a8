"""Built-in models are made once, whole, by whoever comes first; every other path is taken or refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_lib.errors import ModelError
from ppo_lib.models import check_model_path, load_processor, load_tokenizer, resolve_model_path
from ppo_lib.models.cache import REQUIRED_FILES, build_once
from ppo_lib.models.tiny_llama import CHARACTERS


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PPO_LIB_CACHE", str(tmp_path))
    return tmp_path / "models"


def write_required(folder: Path) -> None:
    for name in REQUIRED_FILES:
        (folder / name).write_text("{}")


def test_tiny_llama_loads_with_the_auto_classes_and_is_the_same_each_time(cache):
    folder = resolve_model_path("builtin:tiny-llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    first = model.state_dict()
    assert model.config.num_hidden_layers == 3
    assert (model.config.hidden_size, model.config.num_attention_heads, model.config.num_key_value_heads) == (128, 4, 2)
    assert first["lm_head.weight"].dtype == torch.float32

    before = torch.random.get_rng_state()
    Path(folder, "config.json").unlink()  # no longer whole: made again
    again = AutoModelForCausalLM.from_pretrained(resolve_model_path("builtin:tiny-llama")).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_character_tokenizer_gives_one_token_a_character_and_decodes_them_back():
    tokenizer = load_tokenizer("builtin:tiny-llama")
    assert AutoTokenizer.from_pretrained(resolve_model_path("builtin:tiny-llama")).vocab_size == len(tokenizer)
    ids = tokenizer(CHARACTERS).input_ids
    assert len(ids) == len(CHARACTERS) == 96
    assert len(set(ids)) == 96
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer("é\t").input_ids == [tokenizer.unk_token_id] * 2
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 4
    assert tokenizer.apply_chat_template([{"role": "user", "content": "7:"}], tokenize=False) == "user: 7:\n"


def test_building_leaves_one_line_on_stderr_and_no_other_folder(cache, capsys):
    resolve_model_path("builtin:tiny-llama")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "tiny-llama" in lines[0]
    assert str(cache) in lines[0]
    assert sorted(entry.name for entry in cache.iterdir() if entry.is_dir()) == ["tiny-llama-v1"]
    resolve_model_path("builtin:tiny-llama")
    assert capsys.readouterr().err == ""


def test_a_build_that_fails_or_is_incomplete_leaves_nothing_behind(cache):
    def fails(folder: Path) -> None:
        write_required(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_once("m", fails, "building")
    with pytest.raises(ModelError, match=r"left out .*tokenizer\.json"):
        build_once("m", lambda folder: (folder / "config.json").write_text("{}"), "building")
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == []
    assert build_once("m", write_required, "building") == cache / "m"


def test_leftovers_of_a_killed_build_are_removed(cache):
    stale = cache / ".building-m-dead"
    stale.mkdir(parents=True)
    (cache / "m").mkdir()
    (cache / "m" / "config.json").write_text("{}")
    build_once("m", write_required, "building")
    assert not stale.exists()


def test_processes_that_race_build_once_and_all_get_a_whole_folder(cache):
    program = """
import sys, time
from pathlib import Path
from ppo_lib.models.cache import REQUIRED_FILES, build_once

def build(folder):
    time.sleep(0.3)
    for name in REQUIRED_FILES:
        (folder / name).write_text("{}")

folder = build_once("m", build, "building")
assert all((folder / name).exists() for name in REQUIRED_FILES)
"""
    runs = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, said
    assert sum("building" in text for text in said) == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PPO_LIB_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot build m in the model cache .*PPO_LIB_CACHE"):
        build_once("m", write_required, "building")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("builtin:tiny-lama", "did you mean 'builtin:tiny-llama'"),
        ("builtin:xxxxxxxxxxxxxxxx", "builtin:smollm2-135m"),
        ("/no/such/folder", "'/no/such/folder' does not exist"),
        ("~/no-such-model", "does not exist"),
        ("./no-such-model", "does not exist"),
        ("org/model/extra", "does not exist"),
        ("", "does not exist"),
    ],
)
def test_a_path_that_cannot_be_a_model_is_refused_in_one_line(path, said):
    with pytest.raises(ModelError) as caught:
        check_model_path(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_or_file_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model_path(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_text("")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model_path(str(file))


def test_hub_ids_pass_unchanged_and_a_folder_is_found_under_home(tmp_path, monkeypatch):
    for name in ("gpt2", "Qwen/Qwen2.5-0.5B-Instruct"):
        assert resolve_model_path(name) == name
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_path("~/mine") == str(tmp_path / "mine")


def test_checking_a_path_loads_no_torch():
    program = "import sys, ppo_lib.models as m; m.check_model_path('a/b'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_missing_pad_token_becomes_the_end_of_text_token(tmp_path):
    tokenizer = load_tokenizer("builtin:tiny-llama")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id == tokenizer.eos_token_id


def test_a_folder_without_tokenizer_or_without_end_of_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="cannot load a tokenizer"):
        load_tokenizer(str(tmp_path))
    tokenizer = load_tokenizer("builtin:tiny-llama")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no eos_token"):
        load_tokenizer(str(tmp_path))


def test_custom_chat_template_as_text_or_file(tmp_path):
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(template)
    for given in (template, str(file)):
        tokenizer = load_tokenizer("builtin:tiny-llama", custom_chat_template=given)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<x>"
    with pytest.raises(ModelError, match="neither a Jinja template nor a file"):
        load_tokenizer("builtin:tiny-llama", custom_chat_template=str(tmp_path / "absent.jinja"))


def test_a_text_model_has_no_processor():
    assert load_processor("builtin:tiny-llama") is None


def test_smollm2_ends_its_answers():
    """Half a minute the first time a machine runs it; seconds after, from the cache."""
    tokenizer = load_tokenizer("builtin:smollm2-135m")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path("builtin:smollm2-135m"), dtype=torch.float32)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hi."}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**chat, max_new_tokens=24, do_sample=False)
    assert out[0, -1].item() == 2  # it ended before the limit
