from __future__ import annotations

import subprocess
import sys

import pytest
from rollout_testing import rollout_config

from ppo_lib.errors import ConfigError
from ppo_lib.rollout.sglang.arguments import TAKEN, engine_arguments
from ppo_lib.rollout.sglang.versions import check_arguments, known_arguments, require_sglang


def test_every_interpreter_of_the_environment_can_import_what_needs_the_stand_ins():
    code = "from transformers import LlamaConfig; import torchvision, sgl_kernel; print(sgl_kernel.anything.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "absent", done.stderr


def test_the_arguments_read_from_the_sources_are_those_that_the_engine_takes():
    code = (
        "import inspect; from sglang.srt.server_args import ServerArgs;"
        "print(*[n for n in inspect.signature(ServerArgs).parameters if not n.startswith('_')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == known_arguments()


def test_the_installed_version_is_one_that_is_known_to_work():
    assert require_sglang().startswith("0.5.")


@pytest.mark.parametrize("name", TAKEN)
def test_arguments_that_follow_from_other_keys_cannot_be_passed_through(name):
    with pytest.raises(ConfigError, match=f"{name} cannot be set"):
        check_arguments([name], TAKEN)


def test_the_cache_of_a_cpu_engine_is_sized_by_its_tokens_and_not_by_what_a_gpu_would_set_aside(model_dirs):
    """SGLang sets 1.5 MB a prefill token aside: more than a machine of 24 GB has, which left a negative share."""
    config = rollout_config(model_dirs["llama"], name="sglang", max_num_seqs=16)
    arguments = engine_arguments(config, str(model_dirs["llama"]), "cpu", 264, "float32", None)
    assert arguments["mem_fraction_static"] == 0.9
    assert arguments["max_total_tokens"] == 16 * 264
    config = rollout_config(model_dirs["llama"], name="sglang", engine_kwargs={"sglang": {"mem_fraction_static": 0.5}})
    assert engine_arguments(config, str(model_dirs["llama"]), "cpu", 264, "float32", None)["mem_fraction_static"] == 0.5
