"""Named implementations of a protocol: one table per kind, one error for an unknown name.

Three ways in, and what came in by any of them works wherever a name is asked for:

- in Python: `register("mine", Mine)`, or `@register("mine")` above a class or function;
- an installed package's entry point, in the kind's group (`flmarket.auctions`, `flmarket.models`, …);
- `admit("package.module:Name")`, which imports and thereby runs code.

`get` never imports what a name spells out: names also come in messages from strangers. A path works once somebody on
this machine admitted it: the market file, an option of the command, the owner's own configuration. What would break
that: calling `admit` on a name that came over the network.
"""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from importlib import import_module, metadata
from inspect import Parameter, getdoc, isroutine, signature
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from flmarket.errors import InvalidInput, UnknownName

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Entry(Generic[T]):
    factory: Callable[..., T]
    about: str
    variants: bool = False
    listed: bool = True


class Registry(Generic[T]):
    """Maps names to factories; `get` builds an instance with the given settings.

    `offers` are settings that the market has for every factory of the kind; one that does not take them is built
    without them. Any other setting that a factory does not take is an error. A factory registered with `variants` also
    answers to "name:variant", which goes to it as its first argument. `spoken`: what is built here says its own `name`
    in messages, so what is admitted by its path answers to that too.
    """

    def __init__(
        self, kind: str, group: str | None = None, *, offers: Collection[str] = (), spoken: bool = False
    ) -> None:
        self._kind, self._group, self._offers, self._spoken = kind, group, frozenset(offers), spoken
        self._entries: dict[str, _Entry[T]] = {}

    @overload
    def register(
        self, name: str, *, about: str = "", variants: bool = False, listed: bool = True
    ) -> Callable[[F], F]: ...
    @overload
    def register(self, name: str, factory: F, *, about: str = "", variants: bool = False, listed: bool = True) -> F: ...
    def register(
        self, name: str, factory: Any = None, *, about: str = "", variants: bool = False, listed: bool = True
    ) -> Any:
        """Add a factory under a new name; without one, a decorator.

        `about` is a line for catalogues; what is not `listed` there is for those who ask for it by name.
        """
        if factory is None:
            return lambda made: self.register(name, made, about=about, variants=variants, listed=listed)
        if not isinstance(name, str) or not name or name in self._entries or ":" in name:
            raise InvalidInput(self._kind, name, "a name without ':' that is not taken yet")
        self._add(name, factory, about, variants, listed)
        return factory

    def names(self) -> tuple[str, ...]:
        """All listed names, sorted; entry points are listed without being imported."""
        listed = {name for name, entry in self._entries.items() if entry.listed}
        return tuple(sorted(listed | self._installed.keys() - self._entries.keys()))

    def __contains__(self, name: str) -> bool:
        """Whether `get` knows something of that name, listed or not."""
        return name in self._entries or name in self._installed

    def about(self, name: str) -> str:
        """What it is, in a line: as registered, or the first line of the factory's own documentation."""
        return self._entry(name)[0].about

    def factory(self, name: str) -> Callable[..., T]:
        """The factory behind a name, or a helpful error."""
        return self._entry(name)[0].factory

    def get(self, name: str, **settings: Any) -> T:
        """Build the implementation called `name`; keyword settings go to its constructor."""
        entry, variant = self._entry(name)
        taken = _keywords(entry.factory)
        if taken is not None:
            extra = settings.keys() - taken
            if unknown := extra - self._offers:
                allowed = ", ".join(sorted(taken)) or "no settings"
                raise InvalidInput(f"settings of {self._kind} {name}", ", ".join(sorted(unknown)), allowed)
            settings = {key: value for key, value in settings.items() if key in taken}
        return entry.factory(*variant, **settings)

    def admit(self, name: str) -> str:
        """Check a name, importing it first if it is a `package.module:Name`; returns it, for `get`. Lists nothing."""
        if isinstance(name, str) and ":" in name and not self._is_variant(name) and name not in self._entries:
            found = imported(name, self._kind)
            makes = isinstance(found, type | partial) or isroutine(found)  # anything else serves as it is
            self._add(name, found if makes else lambda: found, _first_line(found), listed=False)
            if self._spoken:
                self._admit_own_name(name, str(getattr(found, "name", None) or getattr(self.get(name), "name", name)))
        self._entry(name)
        return name

    def _admit_own_name(self, path: str, own: str) -> None:
        admitted = self._entries[path]
        if own in self and self.factory(own) is not admitted.factory:
            del self._entries[path]
            raise InvalidInput(f"{self._kind} {path}", own, "a name of its own: something else is called so")
        self._entries.setdefault(own, admitted)

    def _add(
        self, name: str, factory: Callable[..., Any], about: str, variants: bool = False, listed: bool = True
    ) -> None:
        self._entries[name] = _Entry(factory, about or _first_line(factory), variants, listed)

    def _is_variant(self, name: str) -> bool:
        base = name.partition(":")[0]
        return base in self._entries and self._entries[base].variants

    def _entry(self, name: str) -> tuple[_Entry[T], tuple[str, ...]]:
        """The entry and the variant asked for, if any."""
        if isinstance(name, str) and self._is_variant(name):
            base, colon, variant = name.partition(":")
            return self._entries[base], ((variant,) if colon else ())
        if isinstance(name, str) and name not in self._entries and name in self._installed:
            point = self._installed[name]
            try:
                self._add(name, point.load(), "")
            except Exception as error:  # a package of somebody else's: whatever its import raises
                raise InvalidInput(self._kind, name, f"an entry point that can be imported ({error!r})") from error
        if not isinstance(name, str) or name not in self._entries:
            close = get_close_matches(str(name), self.names(), n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise UnknownName(self._kind, name, f"one of {', '.join(self.names())}{hint}")
        return self._entries[name], ()

    @cached_property
    def _installed(self) -> dict[str, metadata.EntryPoint]:
        """What installed packages offer; a name that is registered here already stays what it is."""
        found = metadata.entry_points(group=self._group) if self._group else ()
        return {point.name: point for point in found if ":" not in point.name}


def imported(target: str, field: str = "name") -> Any:
    """What `package.module:Name` names, looked for in the current folder too."""
    module_name, _, attribute = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found: Any = import_module(module_name)
    except Exception as error:  # a module of somebody else's: whatever it raises
        raise UnknownName(field, target, f"package.module:Name that can be imported ({error})") from error
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise UnknownName(field, target, f"a name that {module_name} defines") from None
    return found


def _keywords(factory: Callable[..., Any]) -> frozenset[str] | None:
    """The keywords that a factory takes; None if it takes any."""
    try:
        found = signature(factory).parameters.values()
    except (TypeError, ValueError):  # some built-in types have no signature
        return None
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in found):
        return None
    return frozenset(p.name for p in found if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY))


def _first_line(thing: object) -> str:
    return (getdoc(thing) or "").strip().partition("\n")[0]
