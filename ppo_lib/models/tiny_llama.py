"""`builtin:tiny-llama`: a Llama of half a million random weights over characters, for tests and lessons.

It has never seen text. What it can learn from reward alone in seconds are tasks over single characters, such as
answering "7:" with "77777777".
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

SEED = 0
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "\n" + "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " "))
VOCABULARY = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *CHARACTERS])}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def character_tokenizer() -> Any:
    """One token per printable ASCII character or newline, `<unk>` for any other; adds no special tokens by itself."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK))
    # `.` would not match a newline, and the text around it would become one unknown token
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it decode() puts a space between characters
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build(folder: Path) -> None:
    """Write the model (float32, seeded) and its tokenizer into `folder`. The caller's random state is left alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY[PAD],
        bos_token_id=VOCABULARY[BOS],
        eos_token_id=VOCABULARY[EOS],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
