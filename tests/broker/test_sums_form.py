"""The form of a task in sums: what is typed becomes an order that leaves out what a sum decides by itself."""

import pytest

from flmarket.broker.web.pages.context import Reader
from flmarket.broker.web.pages.posting import _DEFAULTS, _order


@pytest.mark.parametrize("kind", ["auction", "sampling", "reward", "joint"])
def test_a_form_asks_for_sums(kind):
    typed = _DEFAULTS | {
        "name": "x",
        "kind": kind,
        "trust": "secure-aggregation",
        "sum_epsilon": "2",
        "rule": "average",
    }
    reader = Reader(typed)
    order = _order(reader)
    assert not reader.errors
    assert (order.trust, order.broker.open, order.broker.engine) == ("secure-aggregation", False, "simulation")
    assert order.sampling.epsilon == (2.0 if kind == "sampling" else None)
    assert order.mechanism.rule(order.trust) == "secure-opt"
    local = _order(Reader(typed | {"trust": "local"}))
    assert (local.trust, local.broker.open, local.sampling.epsilon) == ("local", True, None)
