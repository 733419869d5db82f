"""The papers' populations of bidders, by name, and a user's own bids from a file.

| name | owners | privacy budget | data size | valuation |
| --- | --- | --- | --- | --- |
| flm21-low, flm21-high | fresh each time | U[0.5, 5] or U[0.5, 2] | equal (1) | α∈U[0.5,1.5] × one of four families |
| flm22-iid | 10 of 1,000 who share 125,973 records, log-normal σ=2, at least 10 | U[0.5, 2] | as drawn | as above |
| flm22-niid | 10 of 1,000, Dirichlet(0.5) over the class counts of NSL-KDD | U[0.5, 2] | as drawn | as above |
| jdp | fresh each time, 100 | 1 (costs only) | integers in [1, 1000] | one cost in U[1, 1000] |

FLM22 shares the data out among 1,000 owners afresh in every run, by a power law whose exponent and by a Dirichlet law
whose concentration it does not state: σ = 2 and 0.5 are the defaults of its published code. A population here has one
such partition, that of `partition_seed`, and draws bidders from it. FLM = FL-Market 2021/2022; JDP = Zhang et al.,
robust joint-DP federated learning.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from flmarket.bids import BidProfile, IntArray, Kind, Valuations
from flmarket.errors import ConfigError, InvalidInput
from flmarket.registry import Registry

# records per attack family in KDDTrain+: normal, DoS, Probe, R2L, U2R
NSL_KDD_CLASS_COUNTS = (67_343, 45_927, 11_656, 995, 52)
MAX_BIDS = 5_000_000


def log_normal_sizes(rng: Generator, owners: int, records: int, *, sigma: float = 2.0, minimum: int = 10) -> IntArray:
    """Split `records` among owners by a heavy-tailed law, everybody getting at least `minimum`."""
    spare = records - owners * minimum
    if owners < 1 or minimum < 0 or spare < 0:
        raise InvalidInput("owners", owners, f"at least 1 and at most {records // max(minimum, 1)} owners")
    share = rng.lognormal(0.0, sigma, owners)
    exact = spare * share / share.sum()
    sizes = np.floor(exact).astype(np.int64)
    largest_remainder = np.argsort(sizes - exact, kind="stable")[: spare - int(sizes.sum())]
    sizes[largest_remainder] += 1
    return np.asarray(sizes + minimum)


def dirichlet_sizes(
    rng: Generator, owners: int, class_counts: Sequence[int], *, concentration: float = 0.5
) -> IntArray:
    """Records per owner when each class is split among owners by a Dirichlet draw; nobody is left with none."""
    shares = rng.dirichlet(np.full(owners, concentration), size=len(class_counts))
    counts = [rng.multinomial(count, share) for count, share in zip(class_counts, shares, strict=True)]
    sizes = np.asarray(np.sum(counts, axis=0), dtype=np.int64)
    for empty in np.flatnonzero(sizes == 0):  # one record each from whoever has most
        sizes[sizes.argmax()] -= 1
        sizes[empty] = 1
    return sizes


@dataclass(frozen=True)
class Population:
    """A distribution of bid profiles. `sizes` are the data sizes to draw from; None means all equal to 1."""

    name: str
    owners: int
    privacy_range: tuple[float, float]
    sizes: IntArray | None = None
    rate_range: tuple[float, float] = (0.5, 1.5)  # of a uniform law

    def sample(self, rng: Generator, batch: int | tuple[int, ...] | None = None, n: int | None = None) -> BidProfile:
        """Draw a batch of profiles of n owners (default: the paper's number)."""
        shape = _shape(batch, self.owners if n is None else n)
        valuations = Valuations(rng.integers(0, 4, shape), rng.uniform(*self.rate_range, shape))
        privacy = rng.uniform(*self.privacy_range, shape)
        if self.sizes is None:
            return BidProfile(valuations, privacy, np.ones(shape))
        if shape[-1] > len(self.sizes):
            raise InvalidInput("n", shape[-1], f"at most the {len(self.sizes)} owners of population {self.name}")
        return BidProfile(valuations, privacy, self.sizes[_distinct(rng, shape, len(self.sizes))].astype(np.float64))


@dataclass(frozen=True)
class CostPopulation:
    """JDP's clients: one private cost each, a public data size, no privacy budget (ε̄ = 1 stands for taking part)."""

    name: str
    owners: int

    def sample(self, rng: Generator, batch: int | tuple[int, ...] | None = None, n: int | None = None) -> BidProfile:
        """Draw a batch of profiles of n clients (default: the paper's 100)."""
        shape = _shape(batch, self.owners if n is None else n)
        size = rng.integers(1, 1000, shape, endpoint=True).astype(np.float64)
        cost = rng.uniform(1.0, 1000.0, shape)
        return BidProfile(Valuations(np.full(shape, int(Kind.STEP)), cost / size), np.ones(shape), size)


def _shape(batch: int | tuple[int, ...] | None, n: int) -> tuple[int, ...]:
    leading = () if batch is None else (batch,) if isinstance(batch, int | np.integer) else tuple(batch)
    shape = tuple(int(k) for k in (*leading, n))
    if min(shape) < 1:
        raise InvalidInput("batch, n", (batch, n), "positive numbers")
    return shape


def _distinct(rng: Generator, shape: tuple[int, ...], total: int) -> IntArray:
    """Indices 0..total-1, distinct along the last axis, uniform over subsets, without sorting `total` keys a row."""
    rows, n = int(np.prod(shape[:-1], dtype=np.int64)), shape[-1]
    if n * n > total:  # collisions would be likely: shuffle instead of drawing again
        picks = np.stack([rng.permutation(total)[:n] for _ in range(rows)])
        return picks.reshape(shape)
    picks = rng.integers(0, total, (rows, n))
    while (bad := (np.diff(np.sort(picks, axis=-1)) == 0).any(axis=-1)).any():
        picks[bad] = rng.integers(0, total, (int(bad.sum()), n))
    return picks.reshape(shape)


@lru_cache(maxsize=16)
def _flm22(name: str, partition_seed: int) -> Population:
    rng = np.random.default_rng(partition_seed)
    if name == "flm22-iid":
        sizes = log_normal_sizes(rng, 1000, sum(NSL_KDD_CLASS_COUNTS))
    else:
        sizes = dirichlet_sizes(rng, 1000, NSL_KDD_CLASS_COUNTS)
    sizes.flags.writeable = False
    return Population(name, 10, (0.5, 2.0), sizes)


_registry: Registry[Population | CostPopulation] = Registry("population")
_registry.register("flm21-low", lambda: Population("flm21-low", 10, (0.5, 5.0)))
_registry.register("flm21-high", lambda: Population("flm21-high", 10, (0.5, 2.0)))
_registry.register("flm22-iid", lambda partition_seed=0: _flm22("flm22-iid", partition_seed))
_registry.register("flm22-niid", lambda partition_seed=0: _flm22("flm22-niid", partition_seed))
_registry.register("jdp", lambda: CostPopulation("jdp", 100))

get = _registry.get
names = _registry.names


def read_bids(path: str | Path) -> BidProfile:
    """Read one profile from a CSV or JSON file with the fields kind, rate, privacy_budget and data_size.

    `kind` is a family by name (linear, quadratic, sqrt, exponential, step). A JSON file holds a list of objects; one
    of kind "tabulated" has `grid` and `values` instead of `rate`.
    """
    path = Path(path)
    rows = _rows(path)
    if not 1 <= len(rows) <= MAX_BIDS:
        raise ConfigError(str(path), f"{len(rows)} bids", f"between 1 and {MAX_BIDS:,}")
    parts = [_valuation(row, f"{path.name} bid {i}") for i, row in enumerate(rows, start=1)]
    if any(part.grid is not None for part in parts):
        valuations = Valuations.concatenate(parts)
    else:
        valuations = Valuations(np.array([p.kind for p in parts]), np.array([p.rate for p in parts]))
    columns = {
        name: [_number(row, name, f"{path.name} bid {i}") for i, row in enumerate(rows, start=1)]
        for name in ("privacy_budget", "data_size")
    }
    return BidProfile(valuations, columns["privacy_budget"], columns["data_size"])


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("bids file", str(path), f"a readable UTF-8 file ({error})") from None
    if path.suffix.lower() == ".json":
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or lists without end
            raise ConfigError(str(path), f"line {getattr(error, 'lineno', '?')}", f"valid JSON ({error})") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(str(path), type(rows).__name__, "a list of objects")
        return rows
    reader = csv.DictReader(text.splitlines(), strict=True)
    try:
        if missing := {"kind", "rate", "privacy_budget", "data_size"} - set(reader.fieldnames or ()):
            raise ConfigError(str(path), reader.fieldnames, f"a header with {', '.join(sorted(missing))}")
        return list(reader)
    except csv.Error as error:
        raise ConfigError(str(path), f"line {reader.line_num}", f"valid CSV ({error})") from None


def _valuation(row: Mapping[str, Any], where: str) -> Valuations:
    names = [kind.name.lower() for kind in Kind]
    kind = str(row.get("kind", "")).strip().lower()
    if kind not in names:
        raise ConfigError(f"{where}, kind", row.get("kind"), f"one of {', '.join(names)}")
    if kind == "tabulated":
        return Valuations.tabulated(row.get("grid") or [], row.get("values") or [])
    return Valuations(Kind[kind.upper()], _number(row, "rate", where))


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or value is None:
        raise ConfigError(f"{where}, {name}", value, "a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}, {name}", value, "a number") from None
    if not np.isfinite(number) or number < 0:
        raise ConfigError(f"{where}, {name}", value, "a finite number of at least 0")
    return number
