"""Writes `envelope.md`, the page of what the envelope can do, from the docstrings of `protocol`.

python docs/generate_envelope.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import protocol
from protocol import DataProto, tensordict_utils

PAGE = Path(__file__).with_name("envelope.md")
COMMAND = "python docs/generate_envelope.py"

INTRODUCTION = """\
# The envelope

<!-- Written by `{command}` from the docstrings of protocol/: change those, then run it again. -->

`DataProto` holds the rows of one batch: tensors in `batch`, one Python value per row in `non_tensor_batch`, and what
holds for all rows in `meta_info`.

```python
import torch

from protocol import DataProto

prompts = DataProto.from_single_dict({{"input_ids": torch.ones(2, 4, dtype=torch.int64), "uid": ["a", "b"]}})
batch = prompts.repeat(4, interleave=True)
batch.union(DataProto.from_dict({{"responses": torch.zeros(8, 3, dtype=torch.int64)}}))
first, second = batch.chunk(2)
print(batch)
```

`union`, `pop`, `rename`, `reorder`, `padding`, `to` and `union_tensor_dict` change their first operand, all or nothing;
everything else returns a new envelope with a `meta_info` of its own. A subclass, and attributes that it adds, go
through every operation. Each error says which field, which shapes and which row, and leaves the operands as they were.

What differs from other envelopes of this name:

- A column of equal-length lists stays one-dimensional, and keeps its dtype, through every operation and round trip.
- `concat` collects `meta_info["metrics"]` and `meta_info["timing"]` from all parts; other keys must agree.
- `make_iterator` shuffles only with `dataloader_kwargs={{"shuffle": True}}`, and warns about a seed without it.
- `save_to_disk` writes safetensors, not a pickle. It refuses what such a file cannot hold by name.
- Padding rows are marked in `is_padding` and have `response_mask` 0. `auto_padding=True` for one envelope, or
  `DataProtoConfig.auto_padding = True` for all of the process, lets `chunk` add them.
- `tensordict_utils.assign_non_tensor` stores a list as one value for all rows; one value per row is
  `assign_non_tensor_stack`'s.
- Pickles are the same under every environment, and arrive on the CPU in memory that can be written.
"""


def page() -> str:
    """The whole page."""
    methods = [name for name, _ in inspect.getmembers(DataProto, callable) if not name.startswith("_")]
    functions = [name for name in protocol.__all__ if inspect.isfunction(getattr(protocol, name))]
    parts = [
        INTRODUCTION.format(command=COMMAND),
        *_table("`DataProto`", DataProto, methods),
        *_table("Functions: `from protocol import ...`", protocol, functions),
        *_table(
            "On a TensorDict of rows: `from protocol import tensordict_utils`",
            tensordict_utils,
            [name for name in tensordict_utils.__all__ if inspect.isfunction(getattr(tensordict_utils, name))],
        ),
    ]
    return "\n".join(parts)


def _table(title: str, home: Any, names: Iterable[str]) -> list[str]:
    lines = [f"## {title}\n", "| call | |", "|---|---|"]
    return [
        *lines,
        *(f"| `{_call(name, getattr(home, name))}` | {_promise(getattr(home, name))} |" for name in names),
        "",
    ]


def _call(name: str, function: Any) -> str:
    """Name and arguments with their defaults, without types."""
    arguments = []
    for argument in inspect.signature(function).parameters.values():
        stars = {argument.VAR_KEYWORD: "**", argument.VAR_POSITIONAL: "*"}.get(argument.kind, "")
        if argument.name != "self":
            arguments.append(
                stars + argument.name + ("" if argument.default is argument.empty else _default(argument.default))
            )
    return f"{name}({', '.join(arguments)})"


def _default(value: Any) -> str:
    return f"={value!r}" if isinstance(value, (str, int, bool, type(None))) else "=..."


def _promise(function: Any) -> str:
    """The first paragraph of the docstring."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
