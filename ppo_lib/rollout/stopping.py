"""When a response ends: stop tokens, stop strings that may span tokens, and the length limit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ppo_lib.errors import RolloutError


class StopStrings:
    """Finds stop strings in growing responses without decoding at every token.

    A stop string can only be completed by a token whose text holds the string's last character (or is empty or part
    of a character). Those tokens are listed once per set of strings; for all others the answer is no at the price of a
    set lookup.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[str] | None = None
        self._closing: dict[frozenset[str], frozenset[int]] = {}

    def completed_by_last(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the last token of a response completes one of the stop strings.

        Args:
            token_ids: The response so far; earlier tokens complete none.
            stop: Non-empty strings.
        """
        if token_ids[-1] not in self._closing_tokens(stop):
            return False
        # A character takes at most four tokens (its bytes), and the first tokens of a window may decode differently
        # than they do in the middle of a text; the margin keeps them outside the string.
        window = 4 * max(len(text) for text in stop) + 8
        text = self._decode(token_ids[-window:])
        return any(one in text for one in stop)

    def _closing_tokens(self, stop: Sequence[str]) -> Collection[int]:
        last = frozenset(text[-1] for text in stop)
        if last not in self._closing:
            self._closing[last] = frozenset(
                i for i, piece in enumerate(self._vocabulary()) if not piece or "�" in piece or last & set(piece)
            )
        return self._closing[last]

    def _vocabulary(self) -> list[str]:
        """The text of each token as it stands behind another one (some tokenizers drop a leading space)."""
        if self._pieces is None:
            anchor = self._tokenizer.encode("a", add_special_tokens=False)
            skip = len(self._decode(anchor))
            texts = self._tokenizer.batch_decode(
                [[*anchor, i] for i in range(len(self._tokenizer))],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
            self._pieces = [text[skip:] for text in texts]
        return self._pieces

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def require_tokenizer(tokenizer: Any | None, stop: Sequence[str]) -> None:
    """Refuse stop strings where there is nothing to decode with.

    Raises:
        RolloutError: There are stop strings and no tokenizer.
    """
    if stop and tokenizer is None:
        raise RolloutError(f"the request has stop strings {list(stop)} but the engine was given no tokenizer")
