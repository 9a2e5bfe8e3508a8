"""`data.sampler`: a class by file and name, refused before a run starts where it cannot work."""

from __future__ import annotations

import pytest

from ppo_lib.config import load_config
from ppo_lib.data import create_sampler, sampler_class
from ppo_lib.errors import ConfigError

GOOD = """
class Backwards:
    def __init__(self, data_source, data_config):
        self.size, self.width = len(data_source), data_config.max_prompt_length

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))

    def __len__(self):
        return self.size
"""


def section(tmp_path, text, name="Backwards"):
    (tmp_path / "mine.py").write_text(text)
    keys = [f"data.sampler.class_path={tmp_path / 'mine.py'}", f"data.sampler.class_name={name}"]
    return load_config(overrides=keys).data


def test_it_is_made_over_the_dataset_with_the_section_data(tmp_path):
    sampler = create_sampler(section(tmp_path, GOOD), ["a", "b", "c"])
    assert list(sampler) == [2, 1, 0]
    assert sampler.width == 512


def test_without_one_there_is_none():
    assert sampler_class(load_config().data) is None
    assert create_sampler(load_config().data, [1]) is None


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (GOOD, "Backward", r"data\.sampler\.class_name: .*mine\.py has no 'Backward'; did you mean 'Backwards'\?"),
        ("Backwards = 3", "Backwards", "Backwards in .* is no sampler: it needs __iter__ and __len__"),
        ("class Backwards:\n    pass\n", "Backwards", "is no sampler"),
        (
            GOOD.replace("data_config)", "config)"),
            "Backwards",
            "keywords data_source and data_config; missing a required",
        ),
        ("1 / 0", "Backwards", r"data\.sampler\.class_path: .*mine\.py, line 1 failed: ZeroDivisionError"),
    ],
)
def test_one_that_cannot_be_made_is_told_early(tmp_path, text, name, says):
    with pytest.raises(ConfigError, match=says):
        sampler_class(section(tmp_path, text, name))


def test_a_missing_file_and_an_error_in_its_constructor(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.sampler\.class_path: there is no file 'gone\.py'"):
        sampler_class(load_config(overrides=["data.sampler.class_path=gone.py", "data.sampler.class_name=C"]).data)
    with pytest.raises(ConfigError, match=r"data\.sampler: Backwards cannot be made: ZeroDivisionError"):
        create_sampler(section(tmp_path, GOOD.replace("self.size,", "1 / 0; self.size,")), [1])
