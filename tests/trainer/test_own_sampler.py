"""A sampler of the user's own, that learns from what came of its prompts, in a whole run and in a resumed one."""

from __future__ import annotations

import pytest
from runs import GRPO, run

CURRICULUM = """
class Curriculum:
    '''Draws the row after the highest one of the batch that it was told of; remembers every score it saw.'''

    def __init__(self, data_source, data_config):
        self.rows, self.next, self.told = len(data_source), 0, []

    def __len__(self):
        return self.rows

    def __iter__(self):
        while True:
            yield self.next % self.rows

    def update(self, batch):
        self.next = int(max(batch.non_tensor_batch["dataset_row"])) + 1
        self.told.append(float(batch.batch["token_level_scores"].sum()))
        print("told", self.next, len(self.told))

    def state_dict(self):
        return {"next": self.next, "told": self.told}

    def load_state_dict(self, state):
        self.next, self.told = state["next"], state["told"]
"""


@pytest.fixture
def words(tmp_path):
    (tmp_path / "curriculum.py").write_text(CURRICULUM)
    return [
        *GRPO,
        f"data.sampler.class_path={tmp_path / 'curriculum.py'}",
        "data.sampler.class_name=Curriculum",
        "data.dataloader_num_workers=null",
        "trainer.total_epochs=1",
    ]


def test_it_is_told_of_each_step_and_a_resumed_run_goes_on_with_what_it_knew(tmp_path, words, capsys):
    whole = run(tmp_path / "whole", *words, "trainer.total_training_steps=3")
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("told")] == [
        "told 1 1",
        "told 2 2",
        "told 3 3",
    ]
    kept = ["trainer.save_freq=1", "trainer.resume_mode=auto"]
    run(tmp_path / "two", *words, *kept, "trainer.total_training_steps=2")
    resumed = run(tmp_path / "two", *words, *kept, "trainer.total_training_steps=3")
    assert "told 3 3" in capsys.readouterr().out
    assert resumed == whole
