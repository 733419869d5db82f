"""Named implementations of a protocol: one small table per package, one error for an unknown name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from flmarket.errors import InvalidInput, UnknownName

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to factories; `get` builds an instance with the given settings.

    A factory registered with `variants` also answers to "name:variant", which goes to it as its first argument.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._factories: dict[str, Callable[..., T]] = {}
        self._with_variants: set[str] = set()
        self._unlisted: set[str] = set()

    def register(self, name: str, factory: Callable[..., T], *, variants: bool = False, listed: bool = True) -> None:
        """Add a factory under a new name; if not `listed`, it is there for those who ask for it by name."""
        if name in self._factories or ":" in name:
            raise InvalidInput(self._kind, name, "a name without ':' that is not taken yet")
        self._factories[name] = factory
        if variants:
            self._with_variants.add(name)
        if not listed:
            self._unlisted.add(name)

    def names(self) -> tuple[str, ...]:
        """All listed names, sorted."""
        return tuple(sorted(self._factories.keys() - self._unlisted))

    def __contains__(self, name: str) -> bool:
        """Whether there is something of that name, listed or not."""
        return name in self._factories

    def factory(self, name: str) -> Callable[..., T]:
        """The factory behind a name, or a helpful error."""
        if not isinstance(name, str) or name not in self._factories:
            close = get_close_matches(str(name), self._factories, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise UnknownName(self._kind, name, f"one of {', '.join(self.names())}{hint}")
        return self._factories[name]

    def get(self, name: str, **settings: Any) -> T:
        """Build the implementation called `name`; keyword settings go to its constructor."""
        base, colon, variant = str(name).partition(":")
        if colon and base in self._with_variants:
            return self.factory(base)(variant, **settings)
        return self.factory(name)(**settings)
