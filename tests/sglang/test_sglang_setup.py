from __future__ import annotations

import subprocess
import sys

import pytest

from ppo_lib.errors import ConfigError
from ppo_lib.rollout.sglang.arguments import TAKEN
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
