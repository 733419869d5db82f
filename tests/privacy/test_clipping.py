from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flmarket.errors import InvalidInput
from flmarket.privacy import clip_l1, clip_l2

vectors = arrays(
    np.float64,
    array_shapes(min_dims=1, max_dims=3, max_side=6),
    elements=st.floats(allow_nan=False, allow_infinity=False),
)
bounds = st.floats(1e-6, 1e6)


def exact_norm_power(row: np.ndarray, order: int) -> Fraction:
    return sum((abs(Fraction(float(x))) ** order for x in row), Fraction(0))


def within(rows: np.ndarray, bound: float, order: int) -> bool:
    return all(exact_norm_power(row, order) <= Fraction(bound) ** order for row in rows.reshape(-1, rows.shape[-1]))


@pytest.mark.parametrize(("clip", "order"), [(clip_l1, 1), (clip_l2, 2)])
@given(array=vectors, bound=bounds)
def test_norm_never_passes_the_bound_even_in_the_last_bit(clip, order, array, bound):
    assert within(clip(array, bound), bound, order)


@pytest.mark.parametrize(("clip", "order"), [(clip_l1, 1), (clip_l2, 2)])
def test_many_coordinates_at_the_bound(clip, order, rng):
    assert within(clip(rng.standard_normal((20, 3000)), 0.1), 0.1, order)


def test_the_exact_check_sees_plain_rounding(rng):
    """The textbook formula does pass the bound in the last bit, so the two tests above can fail."""
    g = rng.standard_normal((200, 50))
    plain = g * np.minimum(1.0, 0.1 / np.linalg.norm(g, axis=-1, keepdims=True))
    assert not within(plain, 0.1, 2)


@pytest.mark.parametrize("clip", [clip_l1, clip_l2])
@given(array=vectors, bound=bounds)
def test_clipping_twice_changes_nothing(clip, array, bound):
    once = clip(array, bound)
    np.testing.assert_array_equal(clip(once, bound), once)


def test_hand_worked():
    np.testing.assert_allclose(clip_l2([[3.0, 4.0], [0.3, 0.4]], 1.0), [[0.6, 0.8], [0.3, 0.4]], rtol=1e-14)
    np.testing.assert_allclose(clip_l1([3.0, -1.0], 2.0), [1.5, -0.5], rtol=1e-14)


def test_vectors_inside_are_untouched_and_not_aliased():
    inside = np.array([0.1, 0.2])
    out = clip_l1(inside, 1.0)
    np.testing.assert_array_equal(out, inside)
    assert out is not inside


def test_extremes():
    np.testing.assert_allclose(clip_l2([1e308, 1e308], 1.0), [0.5**0.5] * 2, rtol=1e-14)
    np.testing.assert_array_equal(clip_l2([0.0, 0.0], 1.0), [0.0, 0.0])
    np.testing.assert_array_equal(clip_l2([5e-324, 0.0], 1.0), [5e-324, 0.0])


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf], [], 3.0, "text", [[1.0], [1.0, 2.0]]])
def test_bad_vectors_are_refused(bad):
    with pytest.raises(InvalidInput, match="vectors"):
        clip_l2(bad, 1.0)


@pytest.mark.parametrize("bound", [0.0, -1.0, np.nan, np.inf])
def test_bad_bounds_are_refused(bound):
    with pytest.raises(InvalidInput, match="bound"):
        clip_l1([1.0], bound)
