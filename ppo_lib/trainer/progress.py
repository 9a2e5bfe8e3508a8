"""What a person sees of a run: the bar while it goes, and the summary when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from ppo_lib.trainer.tracking import METRICS_FILE, tensorboard_dir

REWARD, LENGTH = "critic/score/mean", "response_length/mean"


class Progress:
    """A tqdm bar over training steps with stage, reward and length, and the memory needed for the closing summary."""

    def __init__(self, total_steps: int, done_steps: int = 0):
        self.bar = tqdm(
            total=total_steps, initial=done_steps, desc="training", unit="step", dynamic_ncols=True, disable=None
        )
        self.rewards: list[float] = []
        self._length = float("nan")
        self.validations: list[dict[str, float]] = []

    def stage(self, name: str) -> None:
        """Show which stage has just finished."""
        self.bar.set_postfix_str(f"{name}{self._last()}")

    def step(self, metrics: Mapping[str, float]) -> None:
        """Count one finished step."""
        self.rewards.append(metrics.get(REWARD, float("nan")))
        self._length = metrics.get(LENGTH, float("nan"))
        self.bar.update(1)

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Remember the `val-core` metrics of a validation."""
        self.validations.append({name: value for name, value in metrics.items() if name.startswith("val-core/")})

    def _last(self) -> str:
        return f", reward {self.rewards[-1]:.3f}, length {self._length:.1f}" if self.rewards else ""

    def close(self) -> None:
        """Take the bar off the screen."""
        self.bar.close()

    def summary(self, log_dir: Path, logger: Sequence[str], saved: Path | None) -> str:
        """Reward first and last, validation before and after, where the logs are, and whether anything was saved."""
        lines = [f"Done: {len(self.rewards)} training steps."]
        if self.rewards:
            k = max(1, min(5, len(self.rewards) // 2))
            first, last = sum(self.rewards[:k]) / k, sum(self.rewards[-k:]) / k
            lines.append(f"  reward       first {k} steps {first:.3f}  ->  last {k} steps {last:.3f}")
        if self.validations:
            before, after = self.validations[0], self.validations[-1]
            for name, value in after.items():
                change = f"{before.get(name, float('nan')):.3f}  ->  " if len(self.validations) > 1 else ""
                lines.append(f"  validation   {name.removeprefix('val-core/')}  {change}{value:.3f}")
        places = {"file": log_dir / METRICS_FILE, "tensorboard": tensorboard_dir(log_dir)}
        lines += [f"  {name:<12} {places[name]}" for name in logger if name in places]
        lines.append(
            f"  checkpoint   {saved}"
            if saved
            else "  checkpoint   none: this run saved nothing (see trainer.save_freq)"
        )
        return "\n".join(lines)
