"""Validates job files with pydantic models generated from the settings dataclasses.

Keys, types, limits and defaults are defined by the dataclasses alone. A key that the file leaves out stays
unset in the model, and the dataclass supplies its default.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from plait.schema.limits import KeyLimits, MapContent, OneOf

T = TypeVar("T")


class Section(BaseModel):
    """A section of the job file; unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class OpenSection(Section):
    """A section whose extra keys are options of its `kind`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


@cache
def model_of(settings: Any) -> type[Section]:
    """The pydantic model with the fields of the dataclass `settings`: a section, or a whole job."""
    hints, extra = _hints(settings)
    # The dataclass has the default; None only marks the key as optional.
    keys: dict[str, Any] = {
        field.name: (
            _model_type(hints[field.name]),
            ... if field.default is MISSING and field.default_factory is MISSING else None,
        )
        for field in fields(settings)
        if field.name in hints
    }
    name = settings.__name__.removesuffix("Settings")
    return create_model(name, __base__=Section if extra is None else OpenSection, **keys)


def build(settings: type[T], checked: BaseModel) -> T:
    """Build the dataclass from a validated model; unset keys get their defaults."""
    hints, extra = _hints(typing.cast("Any", settings))
    is_set = checked.model_fields_set
    values = {name: _value(hints[name], getattr(checked, name)) for name in hints if name in is_set}
    if extra is not None:
        values[extra] = dict(checked.model_extra or {})
    return settings(**values)


@cache
def _hints(settings: Any) -> tuple[dict[str, Any], str | None]:
    """The annotated types of a section's keys, and the name of the field for extra keys."""
    hints = typing.get_type_hints(settings, include_extras=True)
    metadata = {field.name: typing.get_args(hints[field.name])[1:] for field in fields(settings)}
    extra = next((name for name, marks in metadata.items() if MapContent.EXTRA_KEYS in marks), None)
    others = {extra, *(name for name, marks in metadata.items() if MapContent.AS_GIVEN in marks)}
    return {name: hints[name] for name in metadata if name not in others}, extra


def _model_type(hint: Any) -> Any:
    """The type of a field for pydantic: lists and dicts as YAML has them, limits as `Field` constraints."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _limited(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return Union[tuple(_model_type(argument) for argument in arguments)]  # noqa: UP007
    if origin is tuple:
        return _list_of(arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, value = arguments
        # Keys of a mapping that is passed on unchanged may be any text.
        return types.GenericAlias(dict, (key if value is Any else _model_type(key), _model_type(value)))
    if hint is str:
        return Annotated[str, AfterValidator(_no_nul)]
    if is_dataclass(hint):
        return model_of(typing.cast("Any", hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Literal[tuple(member.value for member in hint)]
    return hint


def _list_of(arguments: tuple[Any, ...]) -> Any:
    """The list type of a tuple: of any length for `tuple[T, ...]`, else of the tuple's length."""
    items = types.GenericAlias(list, (_model_type(arguments[0]),))
    if arguments[-1] is Ellipsis:
        return Annotated[items, BeforeValidator(_listed)] if _is_text(arguments[0]) else items
    return Annotated[items, Field(min_length=len(arguments), max_length=len(arguments))]


def _is_text(hint: Any) -> bool:
    return hint is str or (typing.get_origin(hint) is Annotated and typing.get_args(hint)[0] is str)


def _listed(value: Any) -> Any:
    """One text stands for a list of it."""
    return [value] if isinstance(value, str) else value


def _limited(hint: Any, metadata: tuple[Any, ...]) -> Any:
    # Limits such as a pattern are checked before NUL characters.
    kind = str if hint is str else _model_type(hint)
    for mark in metadata:
        if isinstance(mark, OneOf):
            return Literal[mark.names]
        if isinstance(mark, KeyLimits):
            given = {name: limit for name, limit in asdict(mark).items() if limit is not None}
            kind = Annotated[kind, Field(**given)]
        elif mark is MapContent.VARIABLES:
            kind = Annotated[kind, AfterValidator(_variables)]
    return Annotated[kind, AfterValidator(_no_nul)] if hint is str else kind


def _no_nul(text: str) -> str:
    """Reject NUL, which ends names of files, hosts and variables."""
    if "\0" in text:
        raise PydanticCustomError("nul", "text without NUL characters")
    return text


def _variables(environment: dict[str, str]) -> dict[str, str]:
    for name in environment:
        if not name or "=" in name:
            raise PydanticCustomError("variable", "names of variables, without '='")
    return environment


def _value(hint: Any, checked: Any) -> Any:
    """Convert a validated value to the type of the dataclass field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if checked is None:
        return None
    if origin is Annotated:
        return _value(arguments[0], checked)
    if origin in (Union, types.UnionType):
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _value(kind, checked)
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in checked)
    if isinstance(checked, BaseModel):
        return build(hint, checked)
    return hint(checked) if isinstance(hint, type) and issubclass(hint, enum.Enum) else checked
