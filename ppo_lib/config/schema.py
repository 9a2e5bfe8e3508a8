"""The configuration as a JSON Schema (draft 7): completion, hover texts and checks in an editor.

Where a file may say more than the models hold, so does the schema: `${a.b}` in place of any value, null for a key that
follows another, an empty section, and `base`. Older names are accepted and marked, never proposed.
"""

from __future__ import annotations

import functools
from typing import Any

from pydantic.fields import FieldInfo

from ppo_lib.config.base import ConfigModel, follows, section_of
from ppo_lib.config.compat import CompatRow, compat_rows
from ppo_lib.config.ppo import PPOConfig
from ppo_lib.config.references import sections_of
from ppo_lib.config.tree import Path, dotted

Schema = dict[str, Any]

_MODELS = ("actor_rollout_ref", "critic")
_REFERENCE: Schema = {"$ref": "#/definitions/reference"}
_BASE: Schema = {
    "description": "Files that this one builds on, relative to itself; later ones win, this one last.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def json_schema() -> Schema:
    """The schema of a YAML file."""
    whole = _section(PPOConfig, ())
    whole["properties"] = {"base": _BASE, **whole["properties"]}
    _add_older_names(whole)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "ppo_lib",
        "description": PPOConfig.__doc__,
        **whole,
        "type": "object",
        "definitions": {
            "reference": {"type": "string", "pattern": r"\$\{[^}]+\}", "description": "The value of another key."}
        },
    }


def value_schema(model: type[ConfigModel], name: str) -> Schema:
    """What pydantic says about the value of one key: its type, limits and choices."""
    found = _properties(model)[name]
    return _draft7({key: value for key, value in found.items() if key not in ("title", "default", "follows")})


@functools.cache
def _properties(model: type[ConfigModel]) -> Schema:
    return model.model_json_schema()["properties"]


def _section(model: type[ConfigModel], path: Path) -> Schema:
    properties = {}
    for name, field in model.model_fields.items():
        below = section_of(field)
        properties[name] = (
            {"description": field.description, **_section(below, (*path, name))}
            if below
            else _key(model, name, field, path)
        )
    return {
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": model.model_config.get("extra") == "allow",
    }


def _key(model: type[ConfigModel], name: str, field: FieldInfo, path: Path) -> Schema:
    schema = value_schema(model, name)
    description = schema.pop("description", "")
    reference = follows(field)
    if reference:
        default = {"description": f"{description} Follows `{followed(reference, path)}`."}
    else:
        default = {"description": description, "default": field.get_default()}
    choices = schema.pop("anyOf", [schema])
    if reference and {"type": "null"} not in choices:
        choices = [*choices, {"type": "null"}]
    return {**default, "anyOf": [*choices, _REFERENCE]}


def followed(reference: str, section: Path) -> str:
    """The key behind "${.x}" or "${..x}" where it stands in `section`; a text with several references as it is."""
    name = reference.removeprefix("${").removesuffix("}")
    if "${" in name:
        return reference
    level = len(name) - len(name.lstrip("."))
    return dotted((*section[: len(section) - level + 1], name[level:])) if level else name


def _draft7(schema: Any) -> Any:
    """Tuples as draft 7 writes them, which is what editors read."""
    if isinstance(schema, list):
        return [_draft7(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {"items" if key == "prefixItems" else key: _draft7(value) for key, value in schema.items()}


def _add_older_names(whole: Schema) -> None:
    """Every line of compat.tsv as a key that an editor accepts, marks with what becomes of it, and does not propose."""
    sections = sections_of(PPOConfig)
    for row in compat_rows():
        name = tuple(row.key.removesuffix(".*").split("."))
        places = [name]
        if name[0] == "*":  # a key of any section of a model, and of sections that are there
            above = [path for path in sections if path[0] in _MODELS]
            places = [(*path, *name[1:]) for path in above if len(name) == 2 or (*path, *name[1:-1]) in sections]
        for place in places:
            _add_older_name(whole, place, row)
    _close(whole, False)


def _add_older_name(whole: Schema, path: Path, row: CompatRow) -> None:
    older = {"deprecationMessage": what_becomes_of(row), "doNotSuggest": True}
    for name in path[:-1]:
        whole = whole.setdefault("properties", {}).setdefault(name, {"type": ["object", "null"]})
    keys = whole.setdefault("properties", {})
    if row.key.endswith(".*"):  # lines above it about single keys of the section keep their words
        keys.setdefault(path[-1], {"type": ["object", "null"]}).setdefault("additionalProperties", older)
    else:
        keys.setdefault(path[-1], older)


def _close(section: Schema, others: bool | Schema) -> None:
    """Give sections that only older names have what the section around them says about any other key."""
    others = section.setdefault("additionalProperties", others)
    for below in section["properties"].values():
        if "properties" in below:
            _close(below, others)


def what_becomes_of(row: CompatRow) -> str:
    """A line of compat.tsv in words."""
    if row.fate == "renamed":
        return f"read as {row.detail}: {row.why}"
    if row.fate == "per_rank":
        return f"divided by the number of ranks and read as {row.detail}"
    if row.fate == "refused":
        harmless = " or ".join(["null", *(row.detail.split("|") if row.detail != "-" else [])])
        return f"refused, except for {harmless}: {row.why}"
    return f"ignored: {row.why}"
