"""Ledgers of each kind."""

import dataclasses

import pytest

from flmarket.ledger import Award


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """A database of each kind, with nothing in it."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/market.db"
    return request.getfixturevalue("postgres")()


@pytest.fixture
def ledger(empty):
    """A ledger whose buyer has 1,000 micro-units."""
    empty.deposit("d1", "buyer", 1000)
    return empty


@pytest.fixture(scope="session")
def award():
    """Makes awards."""

    def make(id="t/0/1", price=300, **changes):
        return dataclasses.replace(Award(id, 0, "buyer", "owner-1", 1.0, price), **changes)

    return make
