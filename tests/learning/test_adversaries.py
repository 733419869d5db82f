import numpy as np
import pytest

from flmarket import InvalidInput
from flmarket.learning import adversaries

Y = np.array([0, 1, 2, 3, 4, 4])


def test_labels_by_hand():
    np.testing.assert_array_equal(adversaries.get("dirty-label", target=3).labels(Y, 5), [3] * 6)
    np.testing.assert_array_equal(adversaries.get("label-flip").labels(Y, 5), [4, 3, 2, 1, 0, 0])
    np.testing.assert_array_equal(adversaries.get("scaled-update", target=1).labels(Y, 5), [1] * 6)
    for honest in ("random-noise", "sign-flip"):
        np.testing.assert_array_equal(adversaries.get(honest).labels(Y, 5), Y)


def test_uploads_by_hand(rng):
    public, honest = np.array([1.0, 1.0]), np.array([4.0, 5.0])
    np.testing.assert_allclose(adversaries.get("sign-flip", factor=2.0).upload(honest, public, rng), [-5.0, -7.0])
    np.testing.assert_allclose(adversaries.get("scaled-update", factor=10.0).upload(honest, public, rng), [31.0, 41.0])
    for follower in ("dirty-label", "label-flip"):
        np.testing.assert_array_equal(adversaries.get(follower).upload(honest, public, rng), honest)
    noise = np.array([adversaries.get("random-noise", factor=3.0).upload(honest, public, rng) for _ in range(2000)])
    np.testing.assert_allclose(np.linalg.norm(noise - public, axis=1), 15.0)  # the honest step is 5 long
    assert np.abs(noise.mean(axis=0) - public).max() < 5 * 15 / np.sqrt(2 * 2000)  # no direction preferred


def test_the_same_stream_gives_the_same_noise():
    one, two = (
        adversaries.get("random-noise").upload(np.ones(4), np.zeros(4), np.random.default_rng(5)) for _ in range(2)
    )
    np.testing.assert_array_equal(one, two)


def test_inputs_are_left_alone(rng):
    labels, honest, public = Y.copy(), np.ones(3), np.zeros(3)
    for name in adversaries.names():
        made = adversaries.get(name)
        assert made.name == name
        assert isinstance(made, adversaries.Adversary)
        made.labels(labels, 5)
        made.upload(honest, public, rng)
    np.testing.assert_array_equal(labels, Y)
    assert (honest == 1).all()
    assert (public == 0).all()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dirty-label", {"target": -1}),
        ("dirty-label", {"target": 1.5}),
        ("sign-flip", {"factor": 0.0}),
        ("random-noise", {"factor": np.inf}),
        ("scaled-update", {"factor": -2.0}),
        ("nobody", {}),
    ],
)
def test_bad_settings_are_refused(name, settings):
    with pytest.raises(InvalidInput):
        adversaries.get(name, **settings)


def test_a_target_that_is_no_class_is_refused():
    with pytest.raises(InvalidInput):
        adversaries.DirtyLabel(5).labels(Y, 5)
