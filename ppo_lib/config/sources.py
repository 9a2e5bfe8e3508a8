"""Where each value was written, for the error that names it."""

from __future__ import annotations

from ppo_lib.config.tree import Path


class Sources:
    """File and line, or override, of each key."""

    def __init__(self) -> None:
        self._places: dict[Path, str] = {}
        self.texts: dict[Path, str | None] = {}
        """How a plain value was written."""
        self.following: set[Path] = set()
        """Keys that nobody wrote and that have another key's value."""

    def note(self, path: Path, place: str, text: str | None) -> None:
        """`path` was written at `place`, a plain value as `text`; a later place replaces an earlier one."""
        self._places[path] = place
        self.texts[path] = text

    def move(self, old: Path, new: Path) -> None:
        """`old` now goes under the name `new`."""
        place = self._places.pop(old, None)
        if place is not None:
            self._places[new], self.texts[new] = place, self.texts.pop(old)

    def of(self, path: Path) -> str:
        """The place of a key, of something in it or of the section around it, in brackets after a space; else ""."""
        inside = [place for written, place in self._places.items() if written[: len(path)] == path]
        if path not in self._places and inside:
            return f" ({inside[0]})"
        for end in range(len(path), 0, -1):
            if path[:end] in self._places:
                return f" ({self._places[path[:end]]})"
        return ""
