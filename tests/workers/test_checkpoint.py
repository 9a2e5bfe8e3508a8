from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from workers_ranks import load_and_train, train_and_save
from workers_testing import config, new_actor, padded_batch, run_ranks, worker_batch

from ppo_lib.errors import CheckpointCorruptError, CheckpointError
from ppo_lib.workers import checkpoint

SCHEDULE = ("actor_rollout_ref.actor.optim.lr_scheduler_type=linear", "critic.optim.lr_scheduler_type=cosine")


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for ours, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for model in ("actor", "critic"):
        for name, tensor in one[model].items():
            assert (tensor - other[model][name]).norm() <= 1e-4 * tensor.norm(), name


def test_resumed_training_goes_on_bit_for_bit(tiny_model: str, tmp_path: Path) -> None:
    cfg = config(tiny_model, *SCHEDULE)
    through = train_and_save(0, 1, cfg, str(tmp_path))
    resumed = load_and_train(0, 1, cfg, str(tmp_path))
    assert through["metrics"] == resumed["metrics"]
    for model in ("actor", "critic"):
        assert all(torch.equal(tensor, resumed[model][name]) for name, tensor in through[model].items())


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2)])
def test_resuming_on_another_number_of_ranks(saving: int, loading: int, tiny_model: str, tmp_path: Path) -> None:
    cfg = config(tiny_model, *SCHEDULE)
    through = run_ranks(train_and_save, saving, cfg, str(tmp_path))
    resumed = run_ranks(load_and_train, loading, cfg, str(tmp_path))
    assert_same(resumed[0], through[0])


@pytest.fixture(scope="module")
def saved(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    train_and_save(0, 1, config(tiny_model), str(folder))
    return folder / "actor"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_export_loads_in_transformers_with_the_same_logits(tiny_model: str, saved: Path) -> None:
    actor = new_actor(config(tiny_model), role="actor")
    actor.load_checkpoint(str(saved))
    td = worker_batch(padded_batch(1))
    ids = td["input_ids"].values()[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(saved / "huggingface")(input_ids=ids).logits
        before = AutoModelForCausalLM.from_pretrained(tiny_model)(input_ids=ids).logits
    count = int(td["response_lens"][0])
    expected = (theirs[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)[-count:]
    torch.testing.assert_close(actor.compute_log_prob(td)["log_probs"].values(), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(theirs, before, atol=1e-2)


def test_nothing_in_a_checkpoint_can_be_executed(saved: Path) -> None:
    files = {file.suffix for file in saved.rglob("*") if file.is_file()}
    assert files <= {".safetensors", ".json", ".jinja"}


def test_large_models_are_written_in_several_files(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", 20_000)
    cfg = config(tiny_model)
    actor = new_actor(cfg, role="actor")
    actor.update_actor(worker_batch(padded_batch(4)))
    actor.save_checkpoint(str(tmp_path), 5)
    files = sorted((tmp_path / "huggingface").glob("model-*.safetensors"))
    assert len(files) > 2
    state = actor.full_state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    other = new_actor(cfg, role="actor")
    assert other.load_checkpoint(str(tmp_path)) == 5
    assert other.get_fingerprint() == actor.get_fingerprint()


def test_contents_say_what_is_saved_and_loaded(tiny_model: str, tmp_path: Path) -> None:
    only_model = config(tiny_model, "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]")
    actor = new_actor(only_model, role="actor")
    actor.update_actor(worker_batch(padded_batch(4)))
    actor.save_checkpoint(str(tmp_path), 1)
    assert not list((tmp_path / "optimizer").iterdir())
    assert not list(tmp_path.glob("rng*"))
    other = new_actor(only_model, role="actor")
    other.load_checkpoint(str(tmp_path))
    assert other.get_fingerprint() == actor.get_fingerprint()
    assert other.actor.engine.optimizer_steps == 0
    with pytest.raises(CheckpointError, match="not extra, optimizer"):
        new_actor(config(tiny_model), role="actor").load_checkpoint(str(tmp_path))


def test_no_checkpoint_and_another_format_are_errors(tiny_model: str, copy: Path, tmp_path: Path) -> None:
    actor = new_actor(config(tiny_model), role="actor")
    with pytest.raises(CheckpointError, match=r"no state\.json"):
        actor.load_checkpoint(str(tmp_path))
    (copy / "state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        actor.load_checkpoint(str(copy))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def drop_tensor(file: Path) -> None:
    tensors = load_file(file)
    tensors.pop("model.norm.weight")
    save_file(tensors, file)


def reshape_tensor(file: Path) -> None:
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("huggingface/model.safetensors", cut, r"model\.safetensors cannot be read"),
        ("huggingface/model.safetensors", Path.unlink, r"neither model\.safetensors nor"),
        ("huggingface/model.safetensors", drop_tensor, r"lacks the tensor 'model\.norm\.weight'"),
        ("huggingface/model.safetensors", reshape_tensor, r"'model\.norm\.weight' is stored as \(31,\)"),
        ("optimizer/optimizer.safetensors", cut, r"optimizer\.safetensors cannot be read"),
        ("rng-0.safetensors", cut, r"rng-0\.safetensors cannot be read"),
        ("state.json", cut, r"state\.json cannot be read"),
    ],
)
def test_damage_is_an_error_that_names_the_file(
    file: str, damage: Any, message: str, copy: Path, tiny_model: str
) -> None:
    damage(copy / file)
    with pytest.raises(CheckpointCorruptError, match=message):
        new_actor(config(tiny_model), role="actor").load_checkpoint(str(copy))
