"""`python -m ppo_lib` is the command `ppo_lib`."""

from __future__ import annotations

import sys

from ppo_lib.cli import main

if __name__ == "__main__":
    sys.exit(main())
