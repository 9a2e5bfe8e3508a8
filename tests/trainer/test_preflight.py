"""Files and machine are checked before anything starts, and complaints name setting and remedy."""

from __future__ import annotations

import json
import logging
import os

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ppo_lib.config import load_config
from ppo_lib.errors import ConfigError, DataError, ModelError, PPOLibError
from ppo_lib.single_controller import available_cores
from ppo_lib.trainer.preflight import preflight

ROW = {"data_source": "arithmetic", "prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}


def config(*overrides):
    base = [
        "data.train_files=builtin:arithmetic",
        "data.val_files=builtin:arithmetic",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.model.path=builtin:tiny-llama",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
    ]
    return load_config(overrides=[*base, *overrides])


def complaint(*overrides, kind=PPOLibError) -> str:
    with pytest.raises(kind) as caught:
        preflight(config(*overrides))
    return str(caught.value)


def json_lines(tmp_path, rows, name="rows.jsonl"):
    file = tmp_path / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_run_that_can_start():
    machine = preflight(config())
    assert (machine.device, machine.rollout_name, machine.world_size) == ("cpu", "hf", 1)
    assert machine.cores == available_cores()


# ------------------------------------------------------------------------------------------------------------- data


def test_a_data_file_that_is_not_there(tmp_path):
    assert "gone.parquet does not exist" in complaint(f"data.train_files={tmp_path}/gone.parquet", kind=DataError)
    assert "gone.parquet does not exist" in complaint(f"data.val_files={tmp_path}/gone.parquet", kind=DataError)


def test_data_that_comes_as_an_object_is_not_looked_for(tmp_path):
    gone = config(f"data.train_files={tmp_path}/a.parquet", f"data.val_files={tmp_path}/b.parquet")
    preflight(gone, check_train_data=False, check_val_data=False)
    with pytest.raises(DataError, match=r"b\.parquet"):
        preflight(gone, check_train_data=False)


@pytest.mark.parametrize(("content", "says"), [(b"", "empty"), (b"PAR1 this is no parquet", "cannot be read")])
def test_a_data_file_that_is_empty_or_damaged(tmp_path, content, says):
    file = tmp_path / "rows.parquet"
    file.write_bytes(content)
    text = complaint(f"data.train_files={file}", kind=DataError)
    assert says in text
    assert str(file) in text


def test_a_parquet_file_without_rows(tmp_path):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "data_source": pa.array([], pa.string())}), file)
    assert "has no rows" in complaint(f"data.train_files={file}", kind=DataError)


def test_a_data_file_without_a_needed_column(tmp_path):
    file = json_lines(tmp_path, [{"question": "1+1=", "data_source": "arithmetic"}] * 8)
    assert "has no column 'prompt'" in complaint(f"data.train_files={file}", kind=DataError)
    preflight(config(f"data.train_files={file}", "data.prompt_key=question"), check_val_data=False)


def test_fewer_rows_than_a_batch(tmp_path):
    file = json_lines(tmp_path, [ROW] * 7)
    text = complaint(f"data.train_files={file}", kind=DataError)
    assert "7 rows, fewer than data.train_batch_size=8; set data.train_batch_size to 7 or less" in text
    assert "data.train_max_samples=5 of 123" in complaint("data.train_max_samples=5", kind=DataError)


def test_a_dataset_class_of_ones_own_opens_the_files_itself(tmp_path):
    module = tmp_path / "mine.py"
    module.write_text("class Rows:\n    pass\n")
    gone = f"data.train_files={tmp_path}/gone.xyz"
    preflight(config(gone, f"data.custom_cls.path={module}", "data.custom_cls.name=Rows"))
    text = complaint(gone, f"data.custom_cls.path={module}", "data.custom_cls.name=Row", kind=ConfigError)
    assert "has no 'Row'; did you mean 'Rows'?" in text


# ------------------------------------------------------------------------------------------------------------ reward


def test_a_reward_file_or_function_that_is_not_there(tmp_path):
    key = "reward.custom_reward_function"
    assert "there is no file" in complaint(f"{key}.path={tmp_path}/gone.py", kind=ConfigError)
    file = tmp_path / "score.py"
    file.write_text("def compute_scores(data_source, solution_str, ground_truth, extra_info): return 0.0\n")
    text = complaint(f"{key}.path={file}", kind=ConfigError)
    assert "has no 'compute_score'; did you mean 'compute_scores'?" in text
    preflight(config(f"{key}.path={file}", f"{key}.name=compute_scores"))


def test_a_reward_file_that_does_not_run(tmp_path):
    file = tmp_path / "score.py"
    file.write_text("import nothing_of_this_name\n")
    text = complaint(f"reward.custom_reward_function.path={file}", kind=ConfigError)
    assert "line 1 failed: ModuleNotFoundError" in text


def test_reward_kwargs_that_the_manager_does_not_take():
    assert "does not take bonus" in complaint("+reward.reward_kwargs.bonus=1", kind=ConfigError)


def test_an_unknown_checkpoint_engine():
    text = complaint("actor_rollout_ref.rollout.checkpoint_engine.backend=nave", kind=ConfigError)
    assert "unknown checkpoint engine 'nave': did you mean 'naive'?" in text


def test_an_unknown_reward_manager():
    text = complaint("reward.reward_manager.name=naiv", kind=ConfigError)
    assert "no reward manager 'naiv'; did you mean 'naive'?" in text


# ------------------------------------------------------------------------------------------------------------- model


def test_a_model_that_is_not_there(tmp_path):
    key = "actor_rollout_ref.model.path"
    assert f"{key}: " in complaint(f"{key}={tmp_path}/gone", kind=ModelError)
    assert "has no config.json" in complaint(f"{key}={tmp_path}", kind=ModelError)
    assert "did you mean 'builtin:tiny-llama'?" in complaint(f"{key}=builtin:tiny-lama", kind=ModelError)


def test_a_hugging_face_id_that_is_neither_cached_nor_reachable():
    text = complaint("actor_rollout_ref.model.path=no-such-organisation-here/no-such-model", kind=ModelError)
    assert text.startswith("actor_rollout_ref.model.path: ")
    assert "'no-such-organisation-here/no-such-model'" in text


def test_a_hugging_face_id_in_the_cache_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--no-such-organisation-here--cached"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    preflight(config("actor_rollout_ref.model.path=no-such-organisation-here/cached"))


def test_the_critics_model_is_checked_where_there_is_a_critic(tmp_path):
    gone = f"critic.model.path={tmp_path}/gone"
    preflight(config(gone))
    assert "critic.model.path: " in complaint(gone, "algorithm.adv_estimator=gae", kind=ModelError)


# ----------------------------------------------------------------------------------------------------------- output


def test_an_output_folder_behind_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    text = complaint(f"trainer.default_local_dir={tmp_path}/file/run", kind=ConfigError)
    assert f"{tmp_path}/file is a file; name a folder" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    assert "cannot write to" in complaint(f"trainer.default_local_dir={tmp_path}/run", kind=ConfigError)


def test_looking_at_the_output_folder_makes_none(tmp_path):
    preflight(config(f"trainer.default_local_dir={tmp_path}/a/b"))
    assert not (tmp_path / "a").exists()


# ---------------------------------------------------------------------------------------------------------- machine


def test_more_ranks_than_cores():
    ranks = 2 * available_cores()
    wanted = [f"trainer.n_gpus_per_node={ranks}", f"actor_rollout_ref.rollout.n={ranks}"]
    text = complaint(*wanted, kind=ConfigError)
    assert f"trainer.n_gpus_per_node={ranks} ranks on the CPU, but this machine has {available_cores()} cores" in text
    assert preflight(config(*wanted, f"ray_kwargs.ray_init.num_cpus={ranks}")).world_size == ranks


def test_several_nodes_need_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    text = complaint("trainer.nnodes=2", kind=ConfigError)
    assert "trainer.nnodes=2 needs a running Ray cluster; set ray_kwargs.ray_init.address" in text
    assert preflight(config("trainer.nnodes=2", "ray_kwargs.ray_init.address=10.0.0.1:6379")).world_size == 2
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert preflight(config("trainer.nnodes=2")).world_size == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_cuda_without_a_gpu():
    assert "torch finds no GPU here" in complaint("trainer.device=cuda", kind=ConfigError)
    assert preflight(config("trainer.device=auto")).device == "cpu"


def test_an_unknown_agent_loop_or_optimizer():
    assert "'single_turn_agnt'" in complaint(
        "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agnt", kind=ConfigError
    )
    text = complaint("actor_rollout_ref.actor.optim.optimizer=AdamX", kind=ConfigError)
    assert "actor_rollout_ref.actor.optim.optimizer=AdamX is not in torch.optim; did you mean Adam" in text
    assert "cannot be imported" in complaint(
        "actor_rollout_ref.actor.optim.optimizer_impl=no_such_module", kind=ConfigError
    )


def test_sglang_settings_under_auto_get_a_line_when_auto_is_hf(caplog):
    with caplog.at_level(logging.WARNING, "ppo_lib.config"):
        preflight(config("actor_rollout_ref.rollout.name=auto", "actor_rollout_ref.rollout.gpu_memory_utilization=0.4"))
    assert [record.getMessage() for record in caplog.records] == [
        "actor_rollout_ref.rollout.gpu_memory_utilization has no effect: rollout.name is auto, which is hf here"
    ]
