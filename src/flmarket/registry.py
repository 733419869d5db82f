"""Named implementations of a protocol: one small table per package, one error for an unknown name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from flmarket.errors import InvalidInput, UnknownName

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to factories; `get` builds an instance with the given settings."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._factories: dict[str, Callable[..., T]] = {}

    def register(self, name: str, factory: Callable[..., T]) -> None:
        """Add a factory under a new name."""
        if name in self._factories:
            raise InvalidInput(self._kind, name, "a name that is not taken yet")
        self._factories[name] = factory

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted(self._factories))

    def factory(self, name: str) -> Callable[..., T]:
        """The factory behind a name, or a helpful error."""
        if not isinstance(name, str) or name not in self._factories:
            close = get_close_matches(str(name), self._factories, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise UnknownName(self._kind, name, f"one of {', '.join(self.names())}{hint}")
        return self._factories[name]

    def get(self, name: str, **settings: Any) -> T:
        """Build the implementation called `name`; keyword settings go to its constructor."""
        return self.factory(name)(**settings)
