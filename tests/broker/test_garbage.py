"""How a broker alone in its process looks for garbage: in what came since, and once in a while in everything."""

import gc

import pytest

from flmarket.broker.app import _Garbage


class Ring:
    def __init__(self):
        self.me = self


@pytest.fixture
def garbage():
    made = []

    def start(seconds):
        made.append(_Garbage(seconds))

    before = gc.get_threshold()
    yield start
    for one in made:
        one.close()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_what_outlived_a_look_is_set_aside(garbage):
    garbage(3600.0)
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    kept = [Ring() for _ in range(1000)]
    gc.collect()
    assert gc.get_freeze_count() >= frozen + 900  # some of what was set aside before may have ended meanwhile
    kept.clear()
    new = [Ring() for _ in range(7)]
    new.clear()
    assert gc.collect() >= 7  # what came since is found, and nothing else
    assert gc.get_freeze_count() >= frozen + 900


def test_once_in_a_while_all_of_it_is_looked_at(garbage):
    garbage(0.0)
    kept = [Ring() for _ in range(100)]
    gc.collect()
    kept.clear()
    assert gc.collect() >= 100
