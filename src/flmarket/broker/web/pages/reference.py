"""The HTTP interface as a page: what `/api/v1/openapi.json` says, for people, and without a script from elsewhere.

Whatever the description holds is shown: operations by tag, their parameters, bodies and answers, and every value that
these are made of.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from flmarket.broker.web.pages.context import AnyVisitor, PageRoute, page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_REF = "#/components/schemas/"
_BOUNDS = (
    ("minimum", "≥ {}"), ("ge", "≥ {}"), ("exclusiveMinimum", "> {}"), ("maximum", "≤ {}"), ("le", "≤ {}"),
    ("exclusiveMaximum", "< {}"), ("minLength", "{} characters at least"), ("maxLength", "{} characters at most"),
    ("minItems", "{} at least"), ("maxItems", "{} at most"), ("pattern", "like {}"),
)  # fmt: skip
_TYPES = {"integer": "whole number", "string": "text", "boolean": "true or false", "object": "object"}
Words = tuple[tuple[str, str], ...]  # of a type: text, and the value it names (or none)


@dataclass(frozen=True)
class Field:
    """A parameter, or one field of a value."""

    name: str
    words: Words
    limits: str
    required: bool
    default: str
    about: str


@dataclass(frozen=True)
class Answer:
    """What may come back."""

    status: str
    about: str
    words: Words


@dataclass(frozen=True)
class Operation:
    """One method at one address."""

    method: str
    path: str
    about: str
    needs_key: bool
    parameters: tuple[Field, ...]
    body: Words
    answers: tuple[Answer, ...]

    @property
    def anchor(self) -> str:
        """Where it is on the page."""
        return re.sub(r"\W+", "-", f"{self.method} {self.path}".lower()).strip("-")


@dataclass(frozen=True)
class Value:
    """A value that bodies and answers are made of."""

    key: str
    about: str
    fields: tuple[Field, ...]

    @property
    def name(self) -> str:
        """Without the module that makes it unique."""
        return short(self.key)


@dataclass(frozen=True)
class Described:
    """The whole interface."""

    about: str
    groups: tuple[tuple[str, tuple[Operation, ...]], ...]
    refusals: tuple[Answer, ...]
    values: tuple[Value, ...]


@router.get("/api")
def show(request: Request, visitor: AnyVisitor) -> HTMLResponse:
    """The page; it never changes while the service runs, and is the same for all strangers."""

    def made() -> HTMLResponse:
        described = visitor.broker.settled.get("the interface", lambda: describe(request.app.openapi()))
        return page(visitor, "reference.html.j2", title="HTTP interface", api=described)

    if visitor.auth is not None:
        return made()
    body = visitor.broker.settled.get("the interface for strangers", lambda: bytes(made().body))
    return HTMLResponse(body, headers={"Cache-Control": "no-store"})


def describe(document: Mapping[str, Any]) -> Described:
    """An OpenAPI document as the page shows it."""
    groups: dict[str, list[Operation]] = {}
    refusals: dict[str, Answer] = {}
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            answers = [_answer(status, one) for status, one in said["responses"].items()]
            refusals |= {one.status: one for one in answers if one.words == (("Problem", "Problem"),)}
            groups.setdefault(said["tags"][0], []).append(
                Operation(
                    method.upper(), path, said.get("description", ""), bool(said.get("security")),
                    tuple(_parameter(one) for one in said.get("parameters", ())),
                    _content(said.get("requestBody", {})),
                    tuple(answers),
                )
            )  # fmt: skip
    schemas = document["components"]["schemas"]
    used = _reachable(document["paths"], schemas)
    values = [_value(key, schemas[key]) for key in sorted(used, key=lambda key: (short(key).lower(), key))]
    told = tuple((tag, tuple(found)) for tag, found in groups.items())
    return Described(document["info"]["description"], told, tuple(refusals[key] for key in sorted(refusals)),
                     tuple(values))  # fmt: skip


def short(key: str) -> str:
    """A value's name without the module before it."""
    return key.rpartition("__")[2]


def _parameter(said: Mapping[str, Any]) -> Field:
    place = "" if said["in"] == "query" else f" ({said['in']})"
    made = _field(said["name"] + place, said["schema"], required=bool(said.get("required")))
    return Field(**vars(made) | {"about": said.get("description", made.about)})


def _answer(status: str, said: Mapping[str, Any]) -> Answer:
    about = "" if said["description"] == "Successful Response" else said["description"]
    return Answer(status, about, _content(said))


def _content(said: Mapping[str, Any]) -> Words:
    """What a body is: a value, or files of these types."""
    content = said.get("content", {})
    words = [_words(one.get("schema", {})) if "json" in kind else ((kind, ""),) for kind, one in content.items()]
    return tuple(part for number, one in enumerate(words) for part in (*((", ", ""),) * bool(number), *one))


def _value(key: str, schema: Mapping[str, Any]) -> Value:
    required = schema.get("required", ())
    fields = [_field(name, one, required=name in required) for name, one in schema.get("properties", {}).items()]
    return Value(key, schema.get("description", ""), tuple(fields))


def _field(name: str, schema: Mapping[str, Any], *, required: bool) -> Field:
    default = schema.get("default")
    shown = "" if required or default in (None, "", {}, []) else _plain(default)
    return Field(name, _words(schema), ", ".join(_limits(schema)), required, shown, schema.get("description", ""))


def _words(schema: Mapping[str, Any]) -> Words:
    """A type in words."""
    if "$ref" in schema:
        key = schema["$ref"].removeprefix(_REF)
        return ((short(key), key),)
    if "const" in schema:
        return ((_plain(schema["const"]), ""),)
    if "enum" in schema:
        return ((" | ".join(map(_plain, schema["enum"])), ""),)
    if "anyOf" in schema:
        words = [_words(one) for one in schema["anyOf"]]
        return tuple(part for number, one in enumerate(words) for part in (*((" or ", ""),) * bool(number), *one))
    if schema.get("type") == "array":
        inside = _words(schema["items"]) if "items" in schema else (("values", ""),)
        return (("list of ", ""), *inside)
    if isinstance(schema.get("additionalProperties"), dict):
        return (("object of ", ""), *_words(schema["additionalProperties"]))
    kind = schema.get("type", "any value")
    return ((_TYPES.get(kind, kind), ""),)


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    """Bounds on a value, also on what is inside of a choice."""
    for key, words in _BOUNDS:
        if key in schema:
            yield words.format(_plain(schema[key]))
    for one in schema.get("anyOf", ()):
        yield from _limits(one)


def _plain(value: Any) -> str:
    """A default or a bound as it is written."""
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return f"{value:,.12g}" if isinstance(value, int | float) else str(value)


def _reachable(paths: Mapping[str, Any], schemas: Mapping[str, Any]) -> set[str]:
    """The values that operations name, and those that these are made of."""
    found, waiting = set[str](), list(_refs(paths))
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting.extend(_refs(schemas[key]))
    return found


def _refs(node: Any) -> Iterator[str]:
    for key, inside in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "$ref":
            yield str(inside).removeprefix(_REF)
        else:
            yield from _refs(inside)
