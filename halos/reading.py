"""Settings out of a TOML file, and every mistake in it as one sentence for its author."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from halos.errors import UserError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

S = TypeVar("S", bound=BaseModel)


def read_settings(path: Path, settings: type[S]) -> S:
    """The TOML file at ``path`` as ``settings``. Raises :class:`UserError`, which names the field.

    Validators find the file's folder in ``info.context["folder"]``.
    """
    document = read_toml(path)
    try:
        return settings.model_validate(document, context={"folder": path.parent})
    except ValidationError as error:
        raise UserError(f"{path}: {sentence(error, settings, document)}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """The document at ``path``, unvalidated. Raises :class:`UserError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; `halos init` writes one") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not text in UTF-8 (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: is not valid TOML: {error}") from error


def sentence(error: ValidationError, settings: type[BaseModel], document: Any) -> str:
    """The mistake in ``document`` that explains the others best: where it is and what to do."""
    # An unknown name comes first: it is often the misspelt one of a field that is then missing.
    details = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    place = find(details["loc"], settings, document)
    # What a validator of a whole table says begins with the field that it speaks of.
    colon = "" if details["type"] == "value_error" and not place.field else ":"
    return f"{place}{colon} {remedy(details, place)}".strip()


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a document a mistake is, and the settings class that governs that table."""

    table: str  # "[sync.local]"; empty for the document as a whole
    field: str  # "rate"; empty for the table as a whole
    owner: type[BaseModel]

    def __str__(self) -> str:
        return f"{self.table} {self.field}".strip()


def find(loc: Sequence[str | int], settings: type[BaseModel], document: Any) -> Place:
    """Translate pydantic's ``loc`` into the words of TOML."""
    owner, names, table, field = settings, list[str](), "", ""
    child: type[BaseModel] | None = settings
    for step in loc:
        document = inside(document, step)
        if isinstance(step, int):
            if child is None:
                field += f", item {step + 1}"
            else:
                table = f"[[{'.'.join(names)}]] {called(document, step)}"
        elif child is not None:  # else a branch of a union
            owner, child = child, settings_in(child, step)
            if child is None and (names or has_plain_fields(owner)):
                field = step
            else:
                names.append(step)
                inner = f"[{'.'.join(names)}]"
                table = f"{table} {step}" if table.startswith("[[") else inner
    return Place(table, field, owner)


def inside(document: Any, step: str | int) -> Any:
    try:
        return document[step]
    except (KeyError, IndexError, TypeError):
        return None


def called(document: Any, index: int) -> str:
    name = inside(document, "name")
    return json.dumps(name) if isinstance(name, str) and name else f"number {index + 1}"


def settings_in(owner: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The settings class of field ``name``, when it is a table or a list of tables."""
    for field_name, field in owner.model_fields.items():
        if name in (field.alias, field_name):
            return settings_of(field.annotation)
    return None


def has_plain_fields(owner: type[BaseModel]) -> bool:
    """Whether a name that is not a table is a field, even at the top of a document."""
    return any(settings_of(field.annotation) is None for field in owner.model_fields.values())


def settings_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(settings_of, get_args(annotation))), None)


def known_names(owner: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in owner.model_fields.items()]


BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "of at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "of at most"),
}
KINDS: Mapping[str, str] = {
    "bool": "true or false",
    "dict": "a table",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "a table",
    "path": "a path in quotes",
    "string": "a text in quotes",
    "tuple": "a list",
}


def remedy(details: ErrorDetails, place: Place) -> str:
    """What is wrong at ``place`` and what would be right."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown(str(details["loc"][-1]), place)
    if kind == "missing":
        return missing(str(details["loc"][-1]), place)
    if kind == "value_error":
        return str(context["error"])
    if kind in BOUNDS:
        bound, words = BOUNDS[kind]
        limit = context[bound]
        amount = f"a whole number {words} {limit}" if isinstance(limit, int) else ""
        return f"{shown(value)} is not allowed; give {amount or f'a number {words} {limit:g}'}"
    if kind == "literal_error":
        return f"{shown(value)} is not allowed; give {context['expected']}"
    if kind == "finite_number":
        return f"{shown(value)} is not allowed; give a finite number"
    family = kind.split("_", 1)[0]
    if family in KINDS:
        wanted = KINDS[family] if place.field or family == "model" else f"tables: [{place.table}]"
        return f"{shown(value)} is not allowed; give {wanted}"
    return f"{shown(value)} is not allowed: {details['msg']}"


def unknown(name: str, place: Place) -> str:
    form, noun = ("{}", "field") if place.field else ("[{}]", "section")
    names = known_names(place.owner)
    close = difflib.get_close_matches(name, names, n=2)
    listed = [form.format(one) for one in close or names]
    hint = f"did you mean {' or '.join(listed)}?" if close else f"there are {', '.join(listed)}"
    return f"no such {noun}; {hint}"


def missing(name: str, place: Place) -> str:
    fields = (f for n, f in place.owner.model_fields.items() if name in (n, f.alias))
    field = next(fields, None)  # none for an item that a list lacks
    if field is None:
        return "is too short; give every item"
    return f"is missing; give {field.description or 'it'}"


def shown(value: Any) -> str:
    """``value`` as TOML writes it, cut when it is long."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
