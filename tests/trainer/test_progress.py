"""The closing summary says what happened, where the logs are, and whether anything was saved."""

from __future__ import annotations

from ppo_lib.trainer.progress import Progress


def test_summary_of_a_run_that_learned_and_saved(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    progress = Progress(total_steps=4)
    progress.validated({"val-core/x/acc/mean@1": 0.25, "val-aux/x/acc/std@1": 9.0})
    for reward in (0.0, 0.5, 0.5, 1.0):
        progress.step({"critic/score/mean": reward, "response_length/mean": 3.0})
    progress.validated({"val-core/x/acc/mean@1": 0.75})
    progress.close()
    saved = tmp_path / "global_step_4"
    assert progress.summary(tmp_path, ["console", "file", "tensorboard"], saved).splitlines() == [
        "Done: 4 training steps.",
        "  reward       first 2 steps 0.250  ->  last 2 steps 0.750",
        "  validation   x/acc/mean@1  0.250  ->  0.750",
        f"  file         {tmp_path / 'metrics.jsonl'}",
        f"  tensorboard  {tmp_path / 'tensorboard'}",
        f"  checkpoint   {saved}",
    ]


def test_summary_of_a_run_that_saved_nothing_says_so_and_where_tensorboard_was_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "elsewhere"))
    progress = Progress(total_steps=4, done_steps=4)
    progress.close()
    lines = progress.summary(tmp_path, ["tensorboard"], None).splitlines()
    assert lines[1:] == [
        f"  tensorboard  {tmp_path / 'elsewhere'}",
        "  checkpoint   none: this run saved nothing (see trainer.save_freq)",
    ]
