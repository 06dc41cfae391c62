"""Fields of JSON bodies that this server does not know, and nulls in place of optional fields.

In a body that changes numbers, an unknown field is refused by name: it would have no effect, and nobody would notice.
But a newer SDK may send each of its fields, whether or not its user has set them. So one that holds nothing (null,
false, 0, "", an empty list or object) is left out: that is how JSON says that a feature is not used. In all other
bodies, unknown fields are left out.

A model may list fields of other servers that it does not offer, in `other_fields`: each with the values that ask for
nothing more than is done anyhow, whether or not they hold something.

A null in the place of a field that may be left out counts as left out, unless the field is a decimal number: there, the
SDK writes null for NaN.

None of this costs anything for a body that holds no such thing.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from tinsmith.errors import UnsupportedError
from tinsmith.hook_values import OtherField
from tinsmith_checkpoints.values import Json

SDK_VERSIONS: Final = "0.22.3 to 0.38.0"
"""Of the SDKs whose every field is known here."""

_PROTOCOL: Final = "tinsmith.protocol."  # the modules of the SDK's bodies; all others are of plugins
_TAGS: Final = ("type", "role")  # the fields that tell objects apart
_MOST_NAMED: Final = 5
_SHOWN_CHARS: Final = 100

Model = TypeVar("Model", bound=BaseModel)


class UnknownField(NamedTuple):
    """A field that is refused. `message` is the name of its message in the protocol, `name` whatever was sent."""

    message: str
    name: str


class UnknownFieldError(UnsupportedError):
    """Fields that would have no effect."""

    def __init__(self, message: str, fields: tuple[UnknownField, ...]) -> None:
        super().__init__(message)
        self.fields = fields
        self.field = fields[0].name


def validated(model: type[Model], content: dict[str, Json]) -> Model:
    """Return an instance of the model. `content` is the caller's to give: nulls and the like may be removed from it.

    Raises UnknownFieldError, or ValidationError for any other fault.
    """
    try:
        return model.model_validate(content)
    except ValidationError:
        found = list(islice(_tidied(model, content, ""), _MOST_NAMED))
    if found:
        fields, lines = zip(*found, strict=True)
        raise _refusal(fields, "; ".join(lines), of_sdk=model.__module__.startswith(_PROTOCOL))
    return model.model_validate(content)


def is_exact(model: type[BaseModel]) -> bool:
    """Return whether nothing in such a body may be without effect."""
    return model.model_config.get("extra") == "forbid"


def unknown(field: UnknownField, what: str, *, allowed: Iterable[str]) -> UnknownFieldError:
    """Make the error for a field outside of JSON. `what` names it, its message and its value."""
    return _refusal((field,), f"{what} is not known, allowed: {', '.join(allowed)}")


def _refusal(fields: tuple[UnknownField, ...], lines: str, *, of_sdk: bool = True) -> UnknownFieldError:
    what = f"this server knows the fields of SDK {SDK_VERSIONS}, and any other" if of_sdk else "it"
    return UnknownFieldError(f"{lines}; {what} would have no effect: remove it", fields)


def _line(model: type[BaseModel], where: str, name: str, value: object) -> str:
    known = list(model.model_fields)
    close = get_close_matches(name, known, 1) if len(name) < _SHOWN_CHARS else []
    hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(known)}"
    return f"{where + name[:_SHOWN_CHARS]!r} ({_shown(value)}) is not known, {hint}"


def _shown(value: object) -> str:
    match value:
        case dict():
            return f"an object of {len(value)} fields"
        case list():
            return f"a list of {len(value)}"
        case str():
            return repr(value[:_SHOWN_CHARS])
        case _:
            return repr(value)


def _tidied(model: type[BaseModel], content: dict[str, Json], where: str) -> Iterator[tuple[UnknownField, str]]:
    """Remove fields that count as left out, and yield the other unknown ones, each with its message.

    An object of another type than the one known here keeps none of its fields: whatever they say, it is refused by its
    type, by those who read that.
    """
    for name in list(content):
        value, field = content[name], model.model_fields.get(name)
        if field is None:
            other = _other_fields(model).get(name)
            if other is not None and not other.takes(value):
                line = f"{where + name!r} ({_shown(value)}) is not offered: {other.note}"
                yield UnknownField(model.__name__, name), line
            elif other is None and value and is_exact(model) and not _is_of_other_type(model, content):
                yield UnknownField(model.__name__, name), _line(model, where, name, value)
            del content[name]
        elif value is None and not field.is_required() and field.annotation is not float:
            del content[name]
        elif (models := _models_in(model).get(name)) is not None:
            for at, part in _parts(value, is_map=get_origin(field.annotation) is dict):
                if isinstance(part, dict):
                    yield from _tidied(_meant(models, part), part, f"{where}{name}{at}.")


def _other_fields(model: type[BaseModel]) -> Mapping[str, OtherField]:
    found: Mapping[str, OtherField] = getattr(model, "other_fields", {})
    return found


def _parts(value: Json, *, is_map: bool) -> Iterator[tuple[str, Json]]:
    """Yield the objects that a field holds, and where: one, a list of them, or several by names of the caller's."""
    if is_map and isinstance(value, dict):
        yield from ((f".{name[:_SHOWN_CHARS]}", part) for name, part in value.items())
    elif isinstance(value, list):
        yield from ((f"[{at}]", part) for at, part in enumerate(value))
    else:
        yield "", value


def _is_of_other_type(model: type[BaseModel], content: dict[str, Json]) -> bool:
    field = model.model_fields.get("type")
    return field is not None and content.get("type") not in (None, field.default, *_literals(model, "type"))


def _meant(models: tuple[type[BaseModel], ...], content: dict[str, Json]) -> type[BaseModel]:
    """Return the model that an object is of: the one with its `type` or `role`, or else the first."""
    return next((each for each in models if any(content.get(tag) in _literals(each, tag) for tag in _TAGS)), models[0])


def _literals(model: type[BaseModel], name: str) -> tuple[Any, ...]:
    """Return the values that a field may have, if it may have certain ones only."""
    field = model.model_fields.get(name)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


@cache
def _models_in(model: type[BaseModel]) -> dict[str, tuple[type[BaseModel], ...]]:
    """Return the models of fields that hold one, or several of them: several, if an object's tag tells them apart."""
    found = {name: tuple(_found_in(field.annotation)) for name, field in model.model_fields.items()}
    return {name: models for name, models in found.items() if models}


def _found_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for each in get_args(annotation):
        yield from _found_in(each)
