"""Writes `configuration.md`, the page of all keys, from the models and tables that validate a configuration.

python docs/generate_configuration.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_lib.config import PPOConfig
from ppo_lib.config.base import ConfigModel, follows, section_of
from ppo_lib.config.compat import CompatRow, compat_row, compat_rows
from ppo_lib.config.references import fields_of
from ppo_lib.config.schema import followed, value_schema
from ppo_lib.config.tree import dotted

PAGE = Path(__file__).with_name("configuration.md")
COMMAND = "python docs/generate_configuration.py"
CUSTOMARY = Path(__file__).parents[1] / "tests" / "config" / "customary_keys.tsv"
FATES = {
    "acts": ("means what it says", ()),
    "renamed": ("read under its newer name", ("newer name",)),
    "ignored": ("accepted; one line says why it changes nothing", ("why",)),
    "refused": ("an error that says why, unless its value asks for nothing", ("why",)),
}

INTRODUCTION = """\
# Configuration

<!-- Written by `{command}`: change the models in ppo_lib/config, then run it again. -->

A run is described by a YAML file, by overrides on the command line, or by both; the overrides win:

```bash
ppo_lib train run.yaml trainer.seed=1 actor_rollout_ref.rollout.n=8
ppo_lib check run.yaml                      # validate, print the arithmetic of a step, check files and machine
ppo_lib config run.yaml -o resolved.yaml    # every key with its value; loads to the same configuration
ppo_lib config --schema -o ppo_lib.json     # a JSON Schema for editors
```

- **Overrides** are `section.key=value`. The value is YAML: `1e-6`, `true`, `null`, `[a, b]`, `"{{a: 1}}"`. A leading
  `+` or `++`, as Hydra has it, changes nothing.
- **`base: other.yaml`** (or a list) in a file names the files that it builds on, relative to itself.
- **`${{a.b}}`** stands for the value of another key: `experiment_name: seed${{trainer.seed}}`. `${{.x}}` is a key
  beside this one, `${{..x}}` one section up.
- **A default `= a.b`** follows that key: where nothing, or null, is given, the key has the other's value.
- **An unknown key** is an error that names the nearest known one. A key that is right in itself and has no effect
  beside the others gets one line that says so, as do [keys that launch scripts bring along](#customary-keys).
- **In an editor** with the YAML language server, `# yaml-language-server: $schema=ppo_lib.json` as the first line of a
  file gives completion, hover texts and checks as one types.

## Sections

{contents}
"""


@dataclass(frozen=True)
class Fate:
    """What becomes of one customary key: a name in FATES, and how to say it."""

    key: str
    scripts: int
    fate: str
    words: str


def page() -> str:
    """The whole page."""
    sections = list(sections_below(PPOConfig, ()))
    contents = "\n".join(f"- [`{name}`](#{anchor(name)}): {lowered(about)}" for name, about, _ in sections)
    parts = [INTRODUCTION.format(command=COMMAND, contents=f"{contents}\n- [customary keys](#customary-keys)")]
    parts += [f"## `{name}`\n\n{about}\n\n{table}\n" for name, about, table in sections]
    return "\n".join([*parts, customary_part(customary_fates())])


def sections_below(model: type[ConfigModel], path: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """(dotted name, what it is about, its table of keys) of each section, in the order of the models."""
    found = []
    keys = [name for name, field in model.model_fields.items() if section_of(field) is None]
    if keys:
        rows = [key_row(model, name, path) for name in keys]
        found.append((dotted(path), one_line(model.__doc__), table(("key", "value", "default", "meaning"), rows)))
    for name, field in model.model_fields.items():
        below = section_of(field)
        if below is not None:
            found += sections_below(below, (*path, name))
    return found


def key_row(model: type[ConfigModel], name: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """One line of a section's table."""
    field = model.model_fields[name]
    reference = follows(field)
    default = f"= `{followed(reference, path)}`" if reference else f"`{json.dumps(field.get_default())}`"
    return f"`{name}`", value_text(value_schema(model, name)), default, one_line(field.description)


def value_text(schema: dict[str, Any]) -> str:
    """A JSON Schema in words."""
    if "anyOf" in schema:
        *choices, last = [value_text(choice) for choice in schema["anyOf"]]
        if choices and last == f"list of {choices[-1]}":
            last = "a list of them"
        return f"{', '.join(choices)}, or {last}" if choices else last
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "pattern" in schema:
        return f"`{schema['title']}`"
    kind: str = schema.get("type", "anything")
    if kind in ("integer", "number"):
        return kind + limits(schema)
    if kind == "array" and isinstance(schema["items"], list):
        return " and ".join(value_text(item) for item in schema["items"])
    if kind == "array":
        return f"list of {value_text(schema['items'])}"
    return {"string": "text", "boolean": "true or false", "object": "mapping"}.get(kind, kind)


def limits(schema: dict[str, Any]) -> str:
    """What goes after the kind of a number: from 0 to 1, above 0."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']:g}" + (f" to {high:g}" if high is not None else "")
    if low is None:
        return ""
    return f" from {low:g}" + (f" to {high:g}" if high is not None else "")


def customary_fates() -> list[Fate]:
    """Every key of the list of what launch scripts type, in its order, with its fate."""
    lines = CUSTOMARY.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [fate_of(key, int(scripts or 0)) for key, _, scripts in rows]


def fate_of(key: str, scripts: int) -> Fate:
    """What becomes of a key; one that is renamed to a key that does not act shares the fate of that."""
    name, via = key, ""
    while not acts(name):
        row = compat_row(name)
        if row is None:
            raise SystemExit(f"{key} has no fate: give it a line in ppo_lib/config/compat.tsv, or a model that has it")
        if row.fate not in ("renamed", "per_rank"):
            return Fate(key, scripts, row.fate, f"{via}{row.why}{exceptions(row)}{refused_below(name)}")
        name = dotted(row.target(name))
        via = f"as `{name}`: "
        if row.fate == "per_rank":
            return Fate(key, scripts, "renamed", f"`{name}`, divided by the number of ranks")
    return Fate(key, scripts, "renamed" if via else "acts", f"`{name}`")


def exceptions(row: CompatRow) -> str:
    """The values of a refused key that ask for nothing."""
    if row.fate != "refused":
        return ""
    values = ["null", *(value for value in row.detail.split("|") if value != "-")]
    return f" (accepted: {', '.join(f'`{value}`' for value in values)})"


def refused_below(name: str) -> str:
    """The keys of an ignored section that are refused."""
    section = name.removesuffix("*")
    rows = [row for row in compat_rows() if row.fate == "refused" and row.key.startswith(section) and row.key != name]
    return "".join(f"; `{row.key}` is refused{exceptions(row)}" for row in rows) if section != name else ""


def acts(key: str) -> bool:
    """Whether a section has the key, or passes on whatever stands there."""
    path = tuple(key.split("."))
    known = fields_of(PPOConfig)
    return any(path[:end] in known for end in range(1, len(path) + 1)) or key.startswith("ray_kwargs.ray_init.")


def customary_part(fates: list[Fate]) -> str:
    """The tables of customary keys, and their counts."""
    counts = []
    for name, (meaning, _) in FATES.items():
        these = [each for each in fates if each.fate == name]
        counts.append((f"[{name}](#{name})", meaning, str(len(these)), str(sum(each.scripts for each in these))))
    counts.append(("all", "", str(len(fates)), str(sum(each.scripts for each in fates))))
    parts = [
        f"""\
## Customary keys

What becomes of the {len(fates)} keys that launch scripts of this pipeline type. `settings` counts the lines of 106
public scripts that set such a key.

{table(("fate", "what that means", "keys", "settings"), counts)}
"""
    ]
    for name, (_, head) in FATES.items():
        rows = [(f"`{each.key}`", each.words, str(each.scripts)) for each in fates if each.fate == name]
        if name == "acts":
            rows = [(key, scripts) for key, _, scripts in rows]
        parts.append(f"### {name.capitalize()}\n\n{table(('key', *head, 'scripts'), rows)}\n")
    return "\n".join(parts)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def anchor(name: str) -> str:
    """What a Markdown page calls the heading of a section."""
    return name.replace(".", "").lower()


def one_line(text: str | None) -> str:
    """A docstring without its line breaks."""
    return " ".join((text or "").split())


def lowered(sentence: str) -> str:
    """A sentence as what follows a colon."""
    return sentence[0].lower() + sentence[1:].removesuffix(".")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
