"""The value types that every mechanism speaks: what owners bid and what they get.

All arrays are batch-first: shape ``(..., n)`` with the n owners last, so one call clears one auction or a million.
A bid is (v, ε̄, d): a valuation of privacy loss per record, the most privacy loss the owner accepts in the round, and
the number of records. Values are checked once, here, on construction; mechanisms may rely on them afterwards.

Notation follows FL-Market (Zheng, Cao, Yoshikawa 2021; Zheng et al., IEEE BigData 2022).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.errors import InvalidInput

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Kind(IntEnum):
    """The families of per-record valuations."""

    LINEAR = 0
    QUADRATIC = 1
    SQRT = 2
    EXPONENTIAL = 3
    STEP = 4
    TABULATED = 5


LINEAR, QUADRATIC, SQRT, EXPONENTIAL, STEP, TABULATED = Kind


class Guarantee(StrEnum):
    """How strong a claim is."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    NONE = "none"


EXACT, APPROXIMATE, NONE = Guarantee


@dataclass(frozen=True)
class Guarantees:
    """What a mechanism promises, under which assumption, and where the promise comes from."""

    truthful: Guarantee
    rational: Guarantee
    budget_feasible: Guarantee
    source: str
    assumes: str = ""


def slices(length: int, step: int) -> Iterator[slice]:
    """The parts of something this long, one after the other: `step` entries each, or one where that is none."""
    step = max(1, step)
    return (slice(start, start + step) for start in range(0, length, step))


def checked_array(name: str, value: ArrayLike, *, minimum: float = 0.0) -> FloatArray:
    """A read-only float array of finite numbers of at least `minimum`, or a typed error."""
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput(name, value, "an array of numbers") from None
    if array.size == 0:
        raise InvalidInput(name, value, "at least one owner")
    if not np.isfinite(array).all():
        raise InvalidInput(name, array[~np.isfinite(array)][0], "finite numbers")
    if (array < minimum).any():
        raise InvalidInput(name, array[array < minimum][0], f"numbers of at least {minimum:g}")
    array.flags.writeable = False
    return array


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(array, order="C")  # unlike ascontiguousarray, keeps a single valuation 0-dimensional
    array.flags.writeable = False
    return array


def _common_shape(**arrays: NDArray[Any]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*(array.shape for array in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise InvalidInput("shape", shapes, "shapes that broadcast together, owners last") from None


class Valuations:
    """What a privacy loss ε of one record is worth to its owner, a family and a rate α per owner.

    LINEAR 2αε · QUADRATIC αε² · SQRT 2α√ε · EXPONENTIAL α(e^ε−1) · STEP α·1[ε>0] · TABULATED α·(table at ε).
    Every one is non-decreasing with v(0) = 0, which the mechanisms rely on.
    """

    __slots__ = ("grid", "kind", "rate", "values")

    def __init__(
        self, kind: ArrayLike, rate: ArrayLike, *, grid: ArrayLike | None = None, values: ArrayLike | None = None
    ) -> None:
        codes = np.asarray(kind)
        if codes.size == 0:
            raise InvalidInput("kind", kind, "at least one owner")
        if codes.dtype.kind not in "iu" or codes.min() < 0 or codes.max() >= len(Kind):
            raise InvalidInput("kind", kind, "integer codes " + ", ".join(f"{k.name}={k.value}" for k in Kind))
        rates = checked_array("rate", rate)
        shape = _common_shape(kind=codes, rate=rates)
        self.kind: NDArray[np.int8] = _frozen(np.broadcast_to(codes, shape).astype(np.int8))
        self.rate: FloatArray = _frozen(np.broadcast_to(rates, shape))
        self.grid: FloatArray | None = None
        self.values: FloatArray | None = None
        if (self.kind == Kind.TABULATED).any() and (grid is None or values is None):
            raise InvalidInput("grid", grid, "a table for TABULATED owners: use Valuations.tabulated")
        if grid is not None and values is not None:
            self.grid, self.values = _checked_table(grid, values, shape)

    @classmethod
    def tabulated(cls, grid: ArrayLike, values: ArrayLike) -> "Valuations":
        """Any non-decreasing valuation, piecewise linear through given points; `values` has shape (..., n, points).

        `grid` (points,) or like `values` holds increasing privacy losses. The line starts at (0, 0); beyond the last
        point the last value holds. A table of shape (points,) alone is one valuation shared by all owners.
        """
        table = checked_array("values", values)
        if table.ndim == 0:
            raise InvalidInput("values", values, "an array of shape (..., n, points)")
        shape = table.shape[:-1]
        return cls(np.full(shape, int(Kind.TABULATED)), np.ones(shape), grid=grid, values=table)

    @classmethod
    def concatenate(cls, parts: "Sequence[Valuations]") -> "Valuations":
        """Put owners of several profiles side by side (along the last axis), tables and families alike."""
        if not parts:
            raise InvalidInput("parts", parts, "at least one Valuations")
        kind = np.concatenate([np.atleast_1d(p.kind) for p in parts], axis=-1)
        rate = np.concatenate([np.atleast_1d(p.rate) for p in parts], axis=-1)
        tables = [p for p in parts if p.grid is not None]
        if not tables:
            return cls(kind, rate)
        points = max(p.grid.shape[-1] for p in tables if p.grid is not None)
        grids, values = zip(*(_padded_table(p, points) for p in parts), strict=True)
        return cls(kind, rate, grid=np.concatenate(grids, axis=-2), values=np.concatenate(values, axis=-2))

    def _rearranged(self, view: Callable[[NDArray[Any]], NDArray[Any]], table_view: Callable[..., Any]) -> "Valuations":
        """The same, already checked values in another arrangement: no second check."""
        made = object.__new__(Valuations)
        made.kind, made.rate = _frozen(view(self.kind)), _frozen(view(self.rate))
        made.grid = None if self.grid is None else _frozen(table_view(self.grid))
        made.values = None if self.values is None else _frozen(table_view(self.values))
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (..., n)."""
        return self.kind.shape

    def broadcast_to(self, shape: tuple[int, ...]) -> "Valuations":
        """The same valuations repeated to a larger shape."""
        if shape == self.shape:
            return self
        return self._rearranged(
            lambda a: np.broadcast_to(a, shape), lambda table: np.broadcast_to(table, (*shape, table.shape[-1]))
        )

    def __getitem__(self, index: Any) -> "Valuations":
        """Select profiles or owners as one would from an array of shape (..., n)."""
        chosen = self._rearranged(lambda a: np.atleast_1d(a[index]), lambda table: np.atleast_2d(table[index]))
        if chosen.kind.size == 0:
            raise InvalidInput("index", index, "at least one owner")
        return chosen

    def reshape(self, shape: tuple[int, ...]) -> "Valuations":
        """The same owners in another batch shape."""
        return self._rearranged(lambda a: a.reshape(shape), lambda table: table.reshape((*shape, table.shape[-1])))

    def scaled(self, factor: ArrayLike) -> "Valuations":
        """The same shapes with every rate multiplied, e.g. a report that overstates by 10 %."""
        return Valuations(self.kind, self.rate * np.asarray(factor), grid=self.grid, values=self.values)

    def per_record(self, epsilon: ArrayLike) -> FloatArray:
        """The value of a privacy loss ε of one record."""
        eps = np.asarray(epsilon, dtype=np.float64)
        kind, rate = self.kind, self.rate
        out = np.zeros(_common_shape(epsilon=eps, valuations=kind), dtype=np.float64)
        present = np.flatnonzero(np.bincount(kind.ravel(), minlength=len(Kind))).tolist()
        for code in present:
            value = self._shape_of(Kind(code), eps)
            if len(present) == 1:
                out += value
            else:
                np.copyto(out, value, where=kind == code)
        return out * rate

    def _shape_of(self, kind: Kind, eps: FloatArray) -> FloatArray:
        if kind is Kind.LINEAR:
            return 2.0 * eps
        if kind is Kind.QUADRATIC:
            return eps * eps
        if kind is Kind.SQRT:
            return 2.0 * np.sqrt(eps)
        if kind is Kind.EXPONENTIAL:
            return np.expm1(np.minimum(eps, 500.0))  # beyond all money; e^710 is no float, and 0 · ∞ no number
        if kind is Kind.STEP:
            return (eps > 0).astype(np.float64)
        assert self.grid is not None
        assert self.values is not None
        return _interpolate(eps, self.grid, self.values)


def _checked_table(grid: ArrayLike, values: ArrayLike, shape: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    knots, heights = checked_array("grid", grid), checked_array("values", values)
    if knots.ndim == 0 or heights.ndim == 0 or knots.shape[-1] != heights.shape[-1]:
        raise InvalidInput("grid", knots.shape, f"as many points as values has ({heights.shape})")
    points = knots.shape[-1]
    try:
        knots, heights = np.broadcast_to(knots, (*shape, points)), np.broadcast_to(heights, (*shape, points))
    except ValueError:
        raise InvalidInput("values", heights.shape, f"shape (..., n, points) fitting owners {shape}") from None
    if (knots[..., 0] > 0).any():
        knots = np.concatenate([np.zeros((*shape, 1)), knots], axis=-1)
        heights = np.concatenate([np.zeros((*shape, 1)), heights], axis=-1)
    width, rise = np.diff(knots, axis=-1), np.diff(heights, axis=-1)
    # a table padded by `concatenate` repeats its last point: no width and no rise
    if (width < 0).any() or ((width == 0) & (rise != 0)).any():
        raise InvalidInput("grid", grid, "strictly increasing privacy losses")
    if (rise < 0).any():
        raise InvalidInput("values", values, "a non-decreasing table")
    if (heights[..., 0] != 0).any():
        raise InvalidInput("values", heights[..., 0].max(), "value 0 at privacy loss 0")
    return _frozen(knots), _frozen(heights)


def _padded_table(part: Valuations, points: int) -> tuple[FloatArray, FloatArray]:
    shape = np.atleast_1d(part.kind).shape
    if part.grid is None or part.values is None:
        return np.zeros((*shape, points)), np.zeros((*shape, points))
    widths = [(0, 0)] * (part.grid.ndim - 1) + [(0, points - part.grid.shape[-1])]
    grid, values = np.pad(part.grid, widths, mode="edge"), np.pad(part.values, widths, mode="edge")
    return np.broadcast_to(grid, (*shape, points)), np.broadcast_to(values, (*shape, points))


def _interpolate(eps: FloatArray, grid: FloatArray, values: FloatArray) -> FloatArray:
    """Piecewise linear interpolation, each owner on her own table."""
    shape = np.broadcast_shapes(eps.shape, grid.shape[:-1])
    eps, grid = np.broadcast_to(eps, shape), np.broadcast_to(grid, (*shape, grid.shape[-1]))
    values = np.broadcast_to(values, grid.shape)
    right = np.clip((grid <= eps[..., None]).sum(axis=-1), 1, grid.shape[-1] - 1)[..., None]
    x0, x1 = (np.take_along_axis(grid, right + step, axis=-1)[..., 0] for step in (-1, 0))
    y0, y1 = (np.take_along_axis(values, right + step, axis=-1)[..., 0] for step in (-1, 0))
    width = x1 - x0
    share = np.divide(eps - x0, width, out=np.ones(shape), where=width > 0)
    return np.asarray(y0 + np.clip(share, 0.0, 1.0) * (y1 - y0))


@dataclass(frozen=True)
class BidProfile:
    """The bids of n owners (or a batch of such profiles): valuations, privacy budgets ε̄ and data sizes d."""

    valuations: Valuations
    privacy_budget: FloatArray
    data_size: FloatArray

    def __init__(self, valuations: Valuations, privacy_budget: ArrayLike, data_size: ArrayLike) -> None:
        if not isinstance(valuations, Valuations):
            raise InvalidInput("valuations", valuations, "a Valuations object")
        budget = checked_array("privacy_budget", privacy_budget)
        size = checked_array("data_size", data_size)
        shape = _common_shape(valuations=valuations.kind, privacy_budget=budget, data_size=size)
        if not shape:
            shape = (1,)
        object.__setattr__(self, "valuations", valuations.broadcast_to(shape))
        object.__setattr__(self, "privacy_budget", _frozen(np.broadcast_to(budget, shape)))
        object.__setattr__(self, "data_size", _frozen(np.broadcast_to(size, shape)))

    @classmethod
    def sample(
        cls,
        rng: np.random.Generator,
        batch: int | tuple[int, ...] | None = None,
        n: int | None = None,
        population: str = "flm22-iid",
    ) -> "BidProfile":
        """Draw profiles of n owners from one of the papers' populations (see `flmarket.populations.names`)."""
        from flmarket import populations

        return populations.get(population).sample(rng, batch, n)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (..., n)."""
        return self.privacy_budget.shape

    @property
    def n(self) -> int:
        """Owners per profile."""
        return self.shape[-1]

    def cost(self, epsilon: ArrayLike) -> FloatArray:
        """What a privacy loss ε costs each owner: data_size · per_record(ε)."""
        return self.data_size * self.valuations.per_record(epsilon)

    @cached_property
    def full_cost(self) -> FloatArray:
        """The cost of selling everything, v(ε̄, d): the single number of a single-minded owner."""
        return _frozen(self.cost(self.privacy_budget))

    def cost_of(self, outcome: "Outcome") -> FloatArray:
        """What each owner gives up if she takes part: the records she sells, at the ε she sells them for."""
        sold = self.data_size if outcome.records is None else outcome.records
        return sold * self.valuations.per_record(outcome.epsilon)

    def utility(self, outcome: "Outcome") -> FloatArray:
        """Payment minus cost at these (true) bids; −∞ where more privacy or records are taken than the owner has."""
        sold = self.data_size if outcome.records is None else outcome.records
        gain = outcome.payment - outcome.participation * self.cost_of(outcome)
        too_much = (outcome.epsilon > self.privacy_budget * (1 + 1e-12)) | (sold > self.data_size * (1 + 1e-12))
        return np.where((outcome.epsilon > 0) & too_much, -np.inf, gain)

    def __getitem__(self, index: Any) -> "BidProfile":
        """Select profiles or owners as one would from an array of shape (..., n)."""
        return self._rearranged(self.valuations[index], lambda array: np.atleast_1d(array[index]))

    def _rearranged(self, valuations: Valuations, view: Callable[[FloatArray], FloatArray]) -> "BidProfile":
        """The same, already checked values in another arrangement: no second check."""
        made = object.__new__(BidProfile)
        arrays = {"privacy_budget": _frozen(view(self.privacy_budget)), "data_size": _frozen(view(self.data_size))}
        made.__dict__.update(valuations=valuations, **arrays)
        return made

    @property
    def flat(self) -> "BidProfile":
        """The same profiles with all batch axes in one: shape (rows, n)."""
        shape = (-1, self.n)
        return self._rearranged(self.valuations.reshape(shape), lambda array: array.reshape(shape))

    def with_reports(self, owner: IntArray, told: "BidProfile") -> "BidProfile":
        """These profiles, (rows, n), but owner k[r] of row r bids what entry r of `told`, (rows,), says.

        Both were checked when they were made: nothing is checked again, and the others' full costs are carried over.
        An audit makes millions of such profiles.
        """
        at = (np.arange(len(owner)), owner)

        def put(mine: NDArray[Any], theirs: NDArray[Any]) -> NDArray[Any]:
            out = mine.copy()
            out[at] = theirs
            return _frozen(out)

        made, values = object.__new__(BidProfile), object.__new__(Valuations)
        one, other = self.valuations, told.valuations
        values.kind, values.rate = put(one.kind, other.kind), put(one.rate, other.rate)
        values.grid = values.values = None
        if one.grid is not None or other.grid is not None:
            points = max(v.grid.shape[-1] for v in (one, other) if v.grid is not None)
            tables = zip(_padded_table(one, points), _padded_table(other, points), strict=True)
            values.grid, values.values = (put(a, b) for a, b in tables)
        made.__dict__.update(
            valuations=values,
            privacy_budget=put(self.privacy_budget, told.privacy_budget),
            data_size=put(self.data_size, told.data_size),
            full_cost=put(self.full_cost, told.full_cost),
        )
        return made


@dataclass(frozen=True)
class Outcome:
    """What an auction decides: a privacy loss and a payment per owner, and how likely each takes part.

    `payment` is the expected payment of the round; `participation` defaults to 1 where ε > 0. `records` says how many
    records each sells, for mechanisms that buy a part; None means all that she reported.
    """

    epsilon: FloatArray
    payment: FloatArray
    participation: FloatArray
    records: FloatArray | None

    def __init__(
        self,
        epsilon: ArrayLike,
        payment: ArrayLike,
        participation: ArrayLike | None = None,
        records: ArrayLike | None = None,
    ) -> None:
        eps, pay = checked_array("epsilon", epsilon), checked_array("payment", payment)
        if eps.shape != pay.shape:
            raise InvalidInput("payment", pay.shape, f"the shape of epsilon, {eps.shape}")
        part = checked_array("participation", eps > 0 if participation is None else participation)
        if part.shape != eps.shape or part.max() > 1:
            raise InvalidInput("participation", participation, f"probabilities of shape {eps.shape}")
        sold = None if records is None else checked_array("records", records)
        if sold is not None and sold.shape != eps.shape:
            raise InvalidInput("records", sold.shape, f"the shape of epsilon, {eps.shape}")
        object.__setattr__(self, "epsilon", eps)
        object.__setattr__(self, "payment", pay)
        object.__setattr__(self, "participation", part)
        object.__setattr__(self, "records", sold)

    @property
    def winners(self) -> NDArray[np.bool_]:
        """Who sells anything."""
        return np.asarray(self.epsilon > 0)

    @property
    def spent(self) -> FloatArray:
        """The sum of payments per profile."""
        return np.asarray(self.payment.sum(axis=-1))


@runtime_checkable
class Auction(Protocol):
    """Budget and bids in, privacy losses and payments out."""

    @property
    def name(self) -> str:
        """The registered name."""

    @property
    def guarantees(self) -> Guarantees:
        """What the mechanism promises."""

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch of them."""


def checked_budget(budget: ArrayLike, batch: tuple[int, ...]) -> FloatArray:
    """Budgets as an array of the batch's shape, finite and not negative, or a typed error."""
    array = checked_array("budget", budget)
    try:
        return np.broadcast_to(array, batch)
    except ValueError:
        raise InvalidInput("budget", array.shape, f"a number or an array of the batch's shape {batch}") from None


def in_parts(
    bids: BidProfile, budget: ArrayLike, rows: int, decide: Callable[[BidProfile, FloatArray], tuple[FloatArray, ...]]
) -> tuple[FloatArray, ...]:
    """What is decided for a batch, from so many of its profiles (rows, n) with their budgets (rows,) at a time."""
    money, flat = checked_budget(budget, bids.shape[:-1]).reshape(-1), bids.flat
    parts = (decide(flat[part], money[part]) for part in slices(len(money), rows))
    return tuple(np.concatenate(each).reshape(bids.shape) for each in zip(*parts, strict=True))
