"""The commands as people run them: exit codes, what goes where, and nothing heavy before it is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launch_line import LAUNCH_LINE

from ppo_lib.cli import main
from ppo_lib.config import load_config
from ppo_lib.errors import RewardError
from ppo_lib.trainer.main_ppo import answer_errors
from ppo_lib.trainer.main_ppo import main as main_ppo

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "yaml_configs" / "quickstart.yaml")
TINY = str(ROOT / "yaml_configs" / "ppo_gae_tiny.yaml")
SMALL_RUN = [
    "trainer.worker_group=local",
    "trainer.total_training_steps=1",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.logger=file",
]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=120, cwd=ROOT)


def answer(capsys, *words: str, command=main) -> tuple[int, str, str]:
    code = command(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ------------------------------------------------------------------------------------------------- as real processes


def test_a_configuration_error_is_its_message_alone(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  total_epoch: 3\n")
    done = run("ppo_lib", "train", str(file))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"unknown key trainer.total_epoch ({file}:2); did you mean trainer.total_epochs?\n"


def test_the_launch_script_entry_point_answers_alike():
    done = run("ppo_lib.trainer.main_ppo", "algorithm.adv_estimator=grop", "data.train_batch_size=-1")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("data.train_batch_size: ")
    assert lines[1].startswith("algorithm.adv_estimator: unknown advantage estimator 'grop': did you mean 'grpo'?")


def test_a_missing_file_is_found_before_torch_or_ray_are_loaded():
    code = (
        "import sys\nfrom ppo_lib.cli import main\n"
        f"code = main(['train', {QUICKSTART!r}, 'data.train_files=gone.parquet'])\n"
        "print(code, [name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "2 []"
    assert "gone.parquet does not exist" in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------- in this process


def test_check_prints_the_arithmetic_and_the_machine(capsys):
    code, out, err = answer(capsys, "check", QUICKSTART)
    assert code == 0, err
    assert "48 = 8 x 6" in out
    assert "8 prompts = 48 rows, 48 a rank" in out
    assert "123 training prompts\n32 validation prompts\n45 steps\n" in out
    assert "ready to train on cpu with the hf engine" in out


def test_check_prints_the_arithmetic_even_where_the_files_are_missing(capsys):
    code, out, err = answer(capsys, "check", QUICKSTART, "data.val_files=gone.parquet")
    assert code == 2
    assert "48 = 8 x 6" in out
    assert "ready" not in out
    assert err == "the data file gone.parquet does not exist.\n"


def test_config_prints_what_loads_to_the_same(capsys, tmp_path):
    code, out, _ = answer(capsys, "config", QUICKSTART, "trainer.seed=9")
    assert code == 0
    assert yaml.safe_load(out)["trainer"]["seed"] == 9
    (tmp_path / "again.yaml").write_text(out)
    assert load_config(tmp_path / "again.yaml") == load_config(QUICKSTART, ["trainer.seed=9"])


def test_overrides_may_stand_before_the_file(capsys):
    code, out, _ = answer(capsys, "config", "trainer.seed=9", QUICKSTART)
    assert (code, yaml.safe_load(out)["trainer"]["seed"]) == (0, 9)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check", "gone.yaml"], "no such configuration file: gone.yaml\n"),
        (["check", QUICKSTART, TINY], "one configuration file at a time"),
        (["train", "trainer.seed"], "no such configuration file: trainer.seed\n"),
        (
            ["train", QUICKSTART, "trainer.seed=x"],
            "trainer.seed: expected an integer, got 'x' (override trainer.seed=x)\n",
        ),
        (
            ["train", QUICKSTART, "actor_rollout_ref.model.path=/gone"],
            "actor_rollout_ref.model.path: the model path '/gone'",
        ),
        (["train", QUICKSTART, "reward.custom_reward_function.path=/gone.py"], "there is no file '/gone.py'"),
        (
            ["train", QUICKSTART, "data.train_batch_size=124", "actor_rollout_ref.actor.ppo_mini_batch_size=124"],
            "123 rows, fewer than",
        ),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(capsys, words, says):
    code, out, err = answer(capsys, *words)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


CHAT = [{"role": "user", "content": "1:"}]


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("rows", "overrides", "says"),
    [
        ([{}, {}, {"prompt": None}], [], "rows.jsonl, row 2: column 'prompt' is null"),
        ([{"prompt": "12345:"}, {"prompt": "67890:"}], ["data.filter_overlong_prompts=true"], "rows.jsonl"),
        ([{}, {"prompt": "67890:"}], ["data.filter_overlong_prompts=true"], "1 rows, fewer than one batch of 2"),
        ([{}, {"agent_name": "tool_agent"}], [], "row 1: column 'agent_name': unknown agent loop 'tool_agent'"),
        ([{}, {"prompt": CHAT}], ["actor_rollout_ref.model.custom_chat_template='{# #}'"], "rendered to nothing"),
        ([{}, {"images": ["x.png"]}], [], "row 1: column 'images' (data.image_key) is not empty"),
        ([{}, {"data_source": "mine"}], [], "row 1: column 'data_source'"),
    ],
    ids=["null prompt", "all filtered", "too few left", "agent name", "empty template", "image", "no scorer"],
)
def test_rows_that_cannot_be_used_are_told_before_ray_starts(capsys, tmp_path, command, rows, overrides, says):
    import ray

    running = ray.is_initialized()
    file = tmp_path / "rows.jsonl"
    usual = {"data_source": "repeat-digit", "prompt": "1:", "reward_model": {"style": "rule", "ground_truth": "1"}}
    file.write_text("".join(json.dumps({**usual, **row}) + "\n" for row in rows))
    small = [word for word in SMALL_RUN if not word.startswith("trainer.worker_group")]
    folder = f"trainer.default_local_dir={tmp_path}"
    code, _, err = answer(capsys, command, TINY, *small, folder, f"data.train_files={file}", *overrides)
    assert code == 2
    assert says in err
    assert ray.is_initialized() == running


@pytest.mark.parametrize("word", [QUICKSTART, "--config-name=x", "trainer.seed"])
def test_main_ppo_takes_overrides_alone(capsys, word):
    code, _, err = answer(capsys, word, command=main_ppo)
    assert code == 2
    assert f"{word!r} is not an override" in err


def test_what_a_worker_added_to_its_error_is_printed_too(capsys):
    @answer_errors
    def failing(arguments=None):
        error = RewardError("sample x: no score")
        error.add_note("rank 1 of actor, in update_actor")
        raise error

    assert failing() == 2
    assert capsys.readouterr().err == "sample x: no score\nrank 1 of actor, in update_actor\n"


def test_an_interrupt_is_no_traceback(capsys):
    @answer_errors
    def interrupted(arguments=None):
        raise KeyboardInterrupt

    assert interrupted() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_error_nobody_expected_keeps_its_traceback():
    @answer_errors
    def broken(arguments=None):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()


def test_no_command_shows_the_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "usage: ppo_lib" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="would download")
def test_gsm8k_without_the_datasets_package_says_what_to_install(capsys, tmp_path):
    code, _, err = answer(capsys, "data", "gsm8k", "--out", str(tmp_path))
    assert code == 2
    assert "pip install datasets" in err


def test_train_trains(capsys, tmp_path):
    code, _, err = answer(capsys, "train", TINY, *SMALL_RUN, f"trainer.default_local_dir={tmp_path}")
    assert code == 0, err
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["training/global_step"] == 1


def test_main_ppo_trains(capsys, tmp_path):
    whole = yaml.safe_load(load_config(TINY, SMALL_RUN).to_yaml())
    words = [f"{section}.{key}={json.dumps(value)}" for section, keys in whole.items() for key, value in keys.items()]
    code, _, err = answer(capsys, *words, f"trainer.default_local_dir={tmp_path}", command=main_ppo)
    assert code == 0, err
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_launch_line_trains_once_model_data_engine_ranks_and_sizes_are_replaced(tmp_path):
    from ppo_lib.data.gsm8k import gsm8k_row, write_parquet

    for split in ("train", "test"):
        rows = [gsm8k_row({"question": f"{n}+1?", "answer": f"Add.\n#### {n + 1}"}, split, n) for n in range(12)]
        write_parquet(rows, tmp_path / f"{split}.parquet")
    replaced = [
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.val_files={tmp_path / 'test.parquet'}",
        "actor_rollout_ref.model.path=builtin:tiny-llama",
        "critic.model.path=builtin:tiny-llama",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.n_gpus_per_node=1",
        "data.train_batch_size=4",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "trainer.total_epochs=1",
    ]
    command = [sys.executable, "-m", "ppo_lib.trainer.main_ppo", *shlex.split(LAUNCH_LINE), *replaced]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "Done: 3 training steps." in done.stdout
    assert done.stdout.count("vf_loss") == 3  # GAE trained its critic in each
    assert (tmp_path / "checkpoints/p/e/global_step_3/actor").is_dir()
    if importlib.util.find_spec("wandb") is None:
        assert done.stderr.count("wandb, which is not installed") == 1
