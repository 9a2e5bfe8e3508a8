"""Checkpoints on disk: whole or absent, at every moment."""

from __future__ import annotations

import json

import pytest

from ppo_lib.errors import CheckpointCorruptError, CheckpointError, ConfigError
from ppo_lib.trainer.checkpoint import CheckpointStore


def save(store: CheckpointStore, step: int, parts: tuple[str, ...] = ("actor", "critic")) -> None:
    with store.writing(step) as folder:
        for part in parts:
            (folder / part).mkdir()
            (folder / part / "weights").write_text(f"{part} {step}")
        (folder / "trainer_state.json").write_text(json.dumps({"global_steps": step}))


def test_nothing_saved_resumes_from_nothing(tmp_path):
    assert CheckpointStore(tmp_path / "none").resolve("auto", None) is None


def test_auto_finds_the_newest_and_disable_finds_none(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 2)
    save(store, 10)
    assert store.resolve("auto", None) == tmp_path / "global_step_10"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert store.resolve("disable", None) is None
    assert store.resolve("resume_path", str(tmp_path / "global_step_2")) == tmp_path / "global_step_2"


def test_a_failed_save_leaves_the_previous_checkpoint_and_no_debris(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def run_out_of_disk():
        with store.writing(2) as folder:
            (folder / "half").write_text("x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_out_of_disk()
    assert store.resolve("auto", None) == tmp_path / "global_step_1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_1", "latest_checkpointed_iteration.txt"]


def test_a_folder_left_by_a_killed_save_is_not_chosen_and_not_in_the_way(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "global_step_2.tmp" / "actor").mkdir(parents=True)
    assert store.resolve("auto", None) == tmp_path / "global_step_1"
    save(store, 2)
    assert store.resolve("auto", None) == tmp_path / "global_step_2"


@pytest.mark.parametrize("damage", ["shorten", "remove", "no manifest", "bad manifest"])
def test_a_damaged_checkpoint_is_a_named_error(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    save(store, 3)
    target = tmp_path / "global_step_3" / ("manifest.json" if "manifest" in damage else "actor/weights")
    if damage in ("remove", "no manifest"):
        target.unlink()
    else:
        target.write_text("{")
    with pytest.raises(CheckpointCorruptError, match=r"actor/weights|manifest\.json"):
        store.resolve("auto", None)


def test_a_pointer_that_is_no_number_and_a_path_that_is_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("twenty")
    with pytest.raises(CheckpointCorruptError, match="'twenty'"):
        store.resolve("auto", None)
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        store.resolve("resume_path", str(tmp_path / "global_step_9"))
    with pytest.raises(ConfigError, match="resume_from_path"):
        store.resolve("resume_path", None)


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 4, parts=("actor", "critic"))
    save(store, 4, parts=("actor",))
    assert not (tmp_path / "global_step_4" / "critic").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_4", "latest_checkpointed_iteration.txt"]


def test_retention_keeps_the_newest_of_each_part_and_survives_a_restart(tmp_path):
    for step in (1, 2, 3, 4):
        save(CheckpointStore(tmp_path, keep_actor=2, keep_critic=1), step)  # a new store each time: a restart
    assert not (tmp_path / "global_step_1").exists()
    assert not (tmp_path / "global_step_2").exists()
    assert (tmp_path / "global_step_3" / "actor").exists()
    assert not (tmp_path / "global_step_3" / "critic").exists()
    assert (tmp_path / "global_step_4" / "actor").exists()
    assert (tmp_path / "global_step_4" / "critic").exists()


def test_without_a_pointer_the_newest_whole_checkpoint_is_found(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 2)
    save(store, 10)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert store.resolve("auto", None) == tmp_path / "global_step_10"


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(CheckpointStore("~/runs"), 1)
    assert CheckpointStore(tmp_path / "runs").resolve("resume_path", "~/runs/global_step_1")


@pytest.mark.parametrize("text", ["[]", '{"files": [1]}', '{"files": {"a": "many"}}'])
def test_a_manifest_of_another_form_is_a_named_error(tmp_path, text):
    store = CheckpointStore(tmp_path)
    save(store, 3)
    (tmp_path / "global_step_3" / "manifest.json").write_text(text)
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.json"):
        store.resolve("auto", None)
