"""Who holds which records: every record of a data set assigned to exactly one owner.

| function | who gets what | source |
| --- | --- | --- |
| `iid_power_law` | sizes heavy-tailed (log-normal), records at random | FLM22's IID setting |
| `dirichlet` | each class split among owners by a Dirichlet draw | Hsu et al. 2019; FLM22's non-IID |
| `equal` | sizes differ by at most one, records at random | – |

Sizes are drawn before records and in the same order as in `flmarket.populations`, so a generator in the same
state gives the same sizes there and here (for Dirichlet, up to the owners whom `minimum` lifts and those who
pay for it). What would break it: reading `records` of one partition against the rows of another data set;
nothing ties them but the number of records.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import IntArray
from flmarket.errors import InvalidInput
from flmarket.learning.streams import whole
from flmarket.populations import log_normal_sizes
from flmarket.privacy.events import checked_positive


@dataclass(frozen=True, eq=False)
class Partition:
    """Record indices grouped by owner: owner k holds ``order[offsets[k]:offsets[k + 1]]``."""

    order: IntArray
    offsets: IntArray

    def __post_init__(self) -> None:
        order, offsets = _integers("order", self.order), _integers("offsets", self.offsets)
        if offsets.size < 2 or offsets[0] != 0 or offsets[-1] != order.size or (np.diff(offsets) < 0).any():
            raise InvalidInput("offsets", offsets, f"a rising sequence from 0 to the {order.size} records")
        if order.size and (order.min() < 0 or order.max() >= order.size or np.bincount(order).max() > 1):
            raise InvalidInput("order", order, f"each of the records 0 to {order.size - 1} exactly once")
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "offsets", offsets)

    @classmethod
    def from_owners(cls, owner_of_record: ArrayLike, owners: int) -> "Partition":
        """The partition in which record i belongs to `owner_of_record[i]`."""
        owner = _integers("owner_of_record", owner_of_record)
        if owner.size and not 0 <= owner.min() <= owner.max() < owners:
            raise InvalidInput("owner_of_record", (owner.min(), owner.max()), f"owners from 0 to {owners - 1}")
        sizes = np.bincount(owner, minlength=owners)
        return cls(np.argsort(owner, kind="stable"), np.concatenate([[0], np.cumsum(sizes)]))

    @property
    def owners(self) -> int:
        """How many owners there are."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> IntArray:
        """Records per owner."""
        return np.diff(self.offsets)

    def records(self, owner: int) -> IntArray:
        """The record indices of one owner."""
        owner = whole("owner", owner, 0, self.owners - 1)
        return self.order[self.offsets[owner] : self.offsets[owner + 1]]

    def select(self, owners: ArrayLike) -> tuple[IntArray, IntArray]:
        """The records of some owners one after the other, and the offsets that tell them apart."""
        chosen = _integers("owners", owners)
        if chosen.size == 0 or chosen.min() < 0 or chosen.max() >= self.owners:
            raise InvalidInput("owners", chosen, f"at least one owner, from 0 to {self.owners - 1}")
        sizes = self.sizes[chosen]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        return self.order[np.repeat(self.offsets[chosen], sizes) + position], offsets


def iid_power_law(
    rng: np.random.Generator, records: int | ArrayLike, owners: int, *, sigma: float = 2.0, minimum: int = 10
) -> Partition:
    """Heavy-tailed sizes of at least `minimum`, records at random. `records`: how many, or their labels."""
    count = _count(records)
    owners = whole("owners", owners, 1)
    minimum = whole("minimum", minimum, 1)
    if not (np.isfinite(sigma) and sigma >= 0):
        raise InvalidInput("sigma", sigma, "a finite number of at least 0")
    sizes = log_normal_sizes(rng, owners, count, sigma=sigma, minimum=minimum)
    return Partition(rng.permutation(count), np.concatenate([[0], np.cumsum(sizes)]))


def equal(rng: np.random.Generator, records: int | ArrayLike, owners: int) -> Partition:
    """Sizes that differ by at most one, records at random. `records`: how many, or their labels."""
    count = _count(records)
    owners = whole("owners", owners, 1, count)
    return Partition(rng.permutation(count), np.arange(owners + 1) * count // owners)


def dirichlet(
    rng: np.random.Generator, labels: ArrayLike, owners: int, *, concentration: float = 0.5, minimum: int = 1
) -> Partition:
    """Each class split among owners by a Dirichlet draw; smaller `concentration`, more unlike owners.

    Whoever ends up with fewer than `minimum` records is given some, drawn at random from the largest
    holdings.
    """
    labels = _integers("labels", labels)
    if labels.size == 0 or labels.min() < 0:
        raise InvalidInput("labels", labels, "at least one label, numbered from 0")
    minimum = whole("minimum", minimum, 1)
    owners = whole("owners", owners, 1, labels.size // minimum)
    checked_positive("concentration", concentration)
    classes = np.bincount(labels)
    shares = rng.dirichlet(np.full(owners, concentration), size=len(classes))
    counts = [rng.multinomial(count, share) for count, share in zip(classes, shares, strict=True)]
    by_class = np.argsort(labels, kind="stable")
    owner = np.empty(labels.size, dtype=np.int64)
    # Dealing each class in random order makes an owner's records of the class a random subset.
    for members, count in zip(np.split(by_class, np.cumsum(classes)[:-1]), counts, strict=True):
        owner[rng.permutation(members)] = np.repeat(np.arange(owners), count)
    return Partition.from_owners(_lift(rng, owner, owners, minimum), owners)


def _lift(rng: np.random.Generator, owner: IntArray, owners: int, minimum: int) -> IntArray:
    """Move random records from the largest holdings until everybody has `minimum`."""
    sizes = np.bincount(owner, minlength=owners)
    missing = np.maximum(minimum - sizes, 0)
    if not missing.any():
        return owner
    keep = _levelled(sizes, int(missing.sum()))
    shuffled = rng.permutation(owner.size)
    grouped = shuffled[np.argsort(owner[shuffled], kind="stable")]
    rank = np.arange(owner.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    given = grouped[rank >= np.repeat(keep, sizes)]
    owner = owner.copy()
    owner[rng.permutation(given)] = np.repeat(np.arange(owners), missing)
    return owner


def _levelled(sizes: IntArray, take: int) -> IntArray:
    """The sizes after taking `take` records one by one, each time from a largest holding."""
    low, high = 0, int(sizes.max())  # the level is the largest that yields at least `take`
    while low < high:
        middle = (low + high + 1) // 2
        if np.maximum(sizes - middle, 0).sum() >= take:
            low = middle
        else:
            high = middle - 1
    keep = np.minimum(sizes, low)
    surplus = int(np.maximum(sizes - low, 0).sum()) - take
    keep[np.flatnonzero(sizes > low)[:surplus]] += 1
    return keep


def _integers(name: str, value: ArrayLike) -> IntArray:
    array = np.asarray(value)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidInput(name, value, "a one-dimensional array of whole numbers")
    array = array.astype(np.int64)
    array.flags.writeable = False
    return array


def _count(records: int | ArrayLike) -> int:
    return whole("records", records, 1) if np.ndim(records) == 0 else len(_integers("records", records))
