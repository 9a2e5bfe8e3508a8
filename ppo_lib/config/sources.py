"""Where each value was written, for the error that names it."""

from __future__ import annotations

from ppo_lib.config.tree import Path


class Sources:
    """File and line, or override, of each key."""

    def __init__(self) -> None:
        self._places: dict[Path, str] = {}

    def note(self, path: Path, place: str) -> None:
        """`path` was written at `place`; a later place replaces an earlier one."""
        self._places[path] = place

    def move(self, old: Path, new: Path) -> None:
        """`old` now goes under the name `new`."""
        place = self._places.pop(old, None)
        if place is not None:
            self._places[new] = place

    def of(self, path: Path) -> str:
        """ " (file:line)" of a key or of the section around it; nothing where it is not known."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._places:
                return f" ({self._places[path[:end]]})"
        return ""
