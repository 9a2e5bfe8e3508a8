"""Runs the tests that need an NVIDIA GPU and prints a table: one line a test, with what happened and how long it took.

pip install -e '.[test,sglang]' && python tests/gpu/run_on_gpu.py
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest


class Table:
    """Collects the outcome of every test."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest after each phase of a test."""
        if report.when == "call" or report.outcome != "passed":
            printed = " / ".join(report.capstdout.splitlines()[-1:])
            self.rows.append((report.nodeid.rpartition("::")[2], report.outcome, report.duration, printed))

    def show(self) -> None:
        """Print it."""
        width = max((len(name) for name, *_ in self.rows), default=4)
        print(f"\n{'test':{width}}  {'outcome':8}{'seconds':>9}")
        for name, outcome, seconds, printed in self.rows:
            print(f"{name:{width}}  {outcome:8}{seconds:>9.1f}  {printed}")


def main() -> int:
    """Exit code: 0 if all passed, 1 if some failed, 2 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("torch finds no GPU here, so there is nothing to run")
        return 2
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(
        f"{', '.join(gpus)}; torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    )
    table = Table()
    tests = Path(__file__).parents[1]
    code = pytest.main(["-m", "gpu", "-q", "-p", "no:cacheprovider", str(tests), *sys.argv[1:]], plugins=[table])
    table.show()
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
