"""What every section shares: frozen, closed, documented under each field, and one way to follow another key."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo


class ConfigModel(BaseModel):
    """A section. Unknown keys are errors; values cannot be changed after validation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=False,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_slip(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        kinds = set() if section_of(field) else _alternatives(field.annotation)
        # pydantic reads `true` as 1 where a number is wanted: a slip such as `total_epochs: true` would train one epoch
        if isinstance(value, bool) and kinds and not kinds & {bool, Any}:
            number = kinds & {int, float}
            raise ValueError(f"expected a {'number' if number else 'value other than true or false'}, got {value}")
        # and Python's None, which YAML reads as a word, or a shell variable that is not set, would name a file
        optional = NoneType in kinds
        if isinstance(value, set | frozenset):
            raise ValueError("expected a list; a set has no order")
        if isinstance(value, str) and not value.isascii() and value.encode("utf-8", "replace").decode() != value:
            raise ValueError(f"{value!a} is no text: it holds half of a character")
        if optional and isinstance(value, str) and value.lower() == "none":
            raise ValueError(f"{value} is a word in YAML; write null for none")
        if value == "" and str in kinds:
            raise ValueError(f"expected text, got nothing{'; write null for none' if optional else ''}")
        return value


def _alternatives(annotation: Any) -> set[Any]:
    """The plain types that an annotation names, under any `Annotated` and `|`."""
    inner = get_args(annotation)
    if not inner or get_origin(annotation) in (Literal, tuple, dict):
        return {annotation}
    return {plain for each in inner if isinstance(each, type) or get_args(each) for plain in _alternatives(each)}


def takes_text(field: FieldInfo) -> bool:
    """Whether any text is a value of the key, and no number."""
    kinds = _alternatives(field.annotation)
    return str in kinds and not kinds & {int, float}


def follow(reference: str, default: Any, **kwargs: Any) -> Any:
    """A field that takes another key's value where it is absent or null.

    `reference` is what one would write in YAML: "${trainer.seed}", or a text holding such references. `default` is
    what the section has when it is built on its own, without the root that knows the other key.
    """
    return Field(default=default, json_schema_extra={"follows": reference}, **kwargs)


def follows(field: FieldInfo) -> str | None:
    """The reference given to `follow`, or None."""
    extra = field.json_schema_extra
    return extra.get("follows") if isinstance(extra, dict) else None  # type: ignore[return-value]


def section_of(field: FieldInfo) -> type[ConfigModel] | None:
    """The model behind a field that holds a section; None for a plain value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, ConfigModel) else None


def walk_fields(model: type[ConfigModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every key of a model and of the sections below it, as (path, field); sections themselves are not listed."""
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is None:
            yield (*prefix, name), field
        else:
            yield from walk_fields(section, (*prefix, name))


def one_or_many(value: Any) -> Any:
    """A single string or number as a list of one."""
    return (value,) if isinstance(value, str | int) else value


Strings = Annotated[tuple[str, ...], BeforeValidator(one_or_many, json_schema_input_type=str | tuple[str, ...])]
"""A list of strings; a single string is a list of one."""
OpenDict = Annotated[
    dict[str, Any],
    BeforeValidator(lambda value: {} if value is None else value, json_schema_input_type=dict[str, Any] | None),
]
"""Keys that are passed on as they are; null is none."""
Frequency = Annotated[int, Field(ge=-1)]
"""Every so many steps; -1 or 0 is never."""
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
TokenIds = Annotated[
    tuple[NonNegative, ...],
    BeforeValidator(one_or_many, json_schema_input_type=NonNegative | tuple[NonNegative, ...]),
]
Workers = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
