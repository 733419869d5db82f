"""The palette keeps its promise: readable on its background, distinct under colour blindness."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from flmarket.report.drawing import DARK, LIGHT, SERIES

# Machado, Oliveira & Fernandes 2009, severity 1.0, on linear RGB
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(color: str) -> np.ndarray:
    value = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb.clip(0, 1)
    f = np.cbrt(xyz / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    light = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(c)) + 0.05 for c in (a, b))
    return light[1] / light[0]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_colours_reach_wcag_aa(theme: dict[str, str]) -> None:
    for name in (*SERIES, "ink", "muted", "good", "bad"):
        assert contrast(theme[name], theme["paper"]) >= 4.5, name


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_series_stay_apart(theme: dict[str, str], vision: str) -> None:
    seen = {name: lab(VISION[vision] @ linear(theme[name])) for name in SERIES}
    for a, b in combinations(SERIES, 2):
        assert np.linalg.norm(seen[a] - seen[b]) >= 15, f"{a} and {b}"


def test_every_colour_is_its_own() -> None:
    # drawings are recoloured by value: two names for one value could not be told apart
    assert len(set(LIGHT.values())) == len(LIGHT)
    assert LIGHT.keys() == DARK.keys()
