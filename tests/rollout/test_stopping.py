from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ppo_lib.rollout.stopping import StopStrings


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE with a few merges, so that one text has many tokenisations and a character several tokens."""
    merges = [("<", "/"), ("a", "n"), ("an", "s"), ("an", "d"), ("Ġ", "a"), ("s", ">"), ("Ċ", "Ċ")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def _stops_at(tokenizer, pieces: list[str], stop: tuple[str, ...]) -> int | None:
    """Index of the token at which a response made of these pieces stops."""
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert None not in ids
    finder = StopStrings(tokenizer)
    return next((i for i in range(len(ids)) if finder.completed_by_last(ids[: i + 1], stop)), None)


@pytest.mark.parametrize(
    ("pieces", "stop", "at"),
    [
        (["x", "Ċ", "y"], ("\n",), 1),
        (["x", "y"], ("\n",), None),
        (["</", "ans", ">", "x"], ("</ans>",), 2),  # spans three tokens
        (["<", "/", "an", "s>", "x"], ("</ans>",), 3),  # the same text, other tokens
        (["</", "ans", "x", ">"], ("</ans>",), None),
        (["ans"], ("a",), 0),  # ends inside a token
        (["s>"], ("s",), 0),
        (["x", "Ġa", "n"], (" a",), 1),
        (["x", "ĊĊ"], ("\n\n", "y"), 1),
        (["x", "Ċ", "Ċ"], ("\n\n",), 2),
        (["x", "Ċ", "y", "Ċ"], ("\n\n", "y\n"), 3),
        (["Ã", "©", "x"], ("é",), 1),  # one character of two tokens
        (["<|end|>", "x"], ("<|end|>",), 0),
    ],
)
def test_stop_strings_are_found_at_the_token_that_completes_them(tokenizer, pieces, stop, at):
    assert _stops_at(tokenizer, pieces, stop) == at


def test_a_stop_string_is_found_far_into_a_long_response(tokenizer):
    assert _stops_at(tokenizer, ["Ã", "©", "an"] * 50 + ["Ã", "©", "</", "ans", ">"], ("é</ans>",)) == 154
