"""The HTTP interface as a page: what `/api/v1/openapi.json` says, for people, and without a script from elsewhere.

Whatever the description holds is shown: operations by tag, their parameters, bodies and answers, and every value that
these are made of.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
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


def describe(document: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAPI document as the page shows it: its operations by tag, all refusals, the values that operations name;
    and how the template says a type, its limits and its default."""
    groups: dict[str, list[tuple[str, str, Any]]] = {}
    refusals: dict[str, str] = {}
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            groups.setdefault(said["tags"][0], []).append((method.upper(), path, said))
            refusals |= {status: one["description"] for status, one in said["responses"].items() if _refuses(one)}
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    used = sorted((key for key in schemas if f'"{_REF}{key}"' in text), key=lambda key: (_short(key).lower(), key))
    told = {"about": document["info"]["description"], "groups": groups, "refusals": dict(sorted(refusals.items()))}
    shown = {"words": _words, "content": _content, "limits": _limits, "default": _default, "refuses": _refuses}
    return told | shown | {"values": [(key, schemas[key]) for key in used], "short": _short, "anchor": _anchor}


def _short(key: str) -> str:
    """A value's name without the module that makes it unique; a page of tasks is called Page_Task_."""
    return re.sub(r"^(Page|Items)_(\w+)_$", r"\1 of \2", key.rpartition("__")[2])


def _anchor(method: str, path: str) -> str:
    """Where an operation is on the page."""
    return re.sub(r"\W+", "-", f"{method} {path}".lower()).strip("-")


def _refuses(answer: Mapping[str, Any]) -> bool:
    """Whether an answer is a Problem."""
    return _content(answer) == (("Problem", "Problem"),)


def _default(schema: Mapping[str, Any]) -> str:
    """What holds if nothing is said; empty if that is nothing."""
    default = schema.get("default")
    return "" if default in (None, "", {}, []) else _plain(default)


def _joined(words: Iterable[Words], between: str) -> Words:
    return tuple(part for number, one in enumerate(words) for part in (*((between, ""),) * bool(number), *one))


def _content(said: Mapping[str, Any]) -> Words:
    """What a body is: a value, or files of these types."""
    content = said.get("content", {})
    return _joined(
        (_words(one.get("schema", {})) if "json" in kind else ((kind, ""),) for kind, one in content.items()), ", "
    )


def _words(schema: Mapping[str, Any]) -> Words:
    """A type in words."""
    if "$ref" in schema:
        key = schema["$ref"].removeprefix(_REF)
        return ((_short(key), key),)
    if "const" in schema:
        return ((_plain(schema["const"]), ""),)
    if "enum" in schema:
        return ((" | ".join(map(_plain, schema["enum"])), ""),)
    if "anyOf" in schema:
        return _joined(map(_words, schema["anyOf"]), " or ")
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
