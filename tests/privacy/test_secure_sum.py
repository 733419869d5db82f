"""Sums of whole numbers: what comes out, what it costs, and that half the noise is caught."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from flmarket.errors import InvalidInput
from flmarket.privacy import SecureNoise, SimulationNoise, ZCdp, clip_l2, epsilon_of_rho, rho_of_epsilon
from flmarket.privacy.secure_sum import (
    SecureAggregation,
    SumTerms,
    added,
    agreed,
    decode,
    encode,
    in_form,
    loss,
    noise_energy,
    squared_limit,
)


class Silence(SimulationNoise):
    """Rounds, and adds nothing."""

    def whole_gaussian(self, size: int, *, scale: float) -> np.ndarray:
        return np.zeros(size, dtype=np.int64)


def market(n: int = 12, p: int = 40, seed: int = 0, clip: float = 0.7, **policy: float) -> tuple:
    rng = np.random.default_rng(seed)
    weights, rho = rng.dirichlet(np.ones(n)).tolist(), rng.uniform(0.005, 0.5, n).tolist()
    terms = agreed(weights, rho, clip=clip, dimension=p, policy=SecureAggregation(**policy))
    return rng, weights, rho, terms


def total_of(vectors, terms, *, clip, source):
    parts = [encode(v, t, clip=clip, topic="t/0", source=source) for v, t in zip(vectors, terms, strict=True)]
    return added(parts, bits=terms[0].bits)


def test_without_noise_the_sum_is_the_weighted_sum_of_clipped_updates() -> None:
    rng, weights, _, terms = market()
    updates = rng.standard_normal((12, 40))
    total = total_of(updates, terms, clip=0.7, source=Silence(rng))
    exact = np.asarray(weights) @ clip_l2(updates, 0.7)
    assert decode(total, terms[0], topic="t/0") == pytest.approx(exact, abs=12 * 2 / terms[0].scale * sqrt(40))


def test_rounding_is_unbiased_and_noise_has_the_stated_energy() -> None:
    rng, weights, _, terms = market(n=4, p=25)
    updates = rng.standard_normal((4, 25))
    exact = np.asarray(weights) @ clip_l2(updates, 0.7)
    errors = np.array(
        [
            decode(total_of(updates, terms, clip=0.7, source=SimulationNoise(rng)), terms[0], topic="t/0") - exact
            for _ in range(600)
        ]
    )
    energy = noise_energy(terms[0], contributors=4, dimension=25)
    assert (errors**2).sum(axis=1).mean() == pytest.approx(energy, rel=0.05)
    assert np.abs(errors.mean(axis=0)).max() < 4.5 * sqrt(energy / 25 / 600)


def test_what_leaves_is_whole_numbers_below_the_modulus_and_adds_up_in_any_type() -> None:
    rng, _, _, terms = market()
    part = encode(rng.standard_normal(40), terms[0], clip=0.7, topic="t/0", source=SimulationNoise(rng))
    assert part.dtype == np.uint64
    assert int(part.max()) < 2**32
    again = added([part.astype(np.float64), part.astype(np.float64)], bits=32)
    assert np.array_equal(again, added([part, part], bits=32))
    assert in_form(part.astype(np.float64), length=40, bits=32) == ""
    for wrong in (part[1:], part + 0.5, part - 2.0**33, np.full(40, np.nan), ["x"] * 40):
        assert in_form(wrong, length=40, bits=32)


@pytest.mark.parametrize("policy", [{}, {"survivors": 1.0}, {"survivors": 0.7, "colluders": 0.3}])
def test_nobody_loses_more_than_she_sold_and_the_noise_is_the_least(policy: dict[str, float]) -> None:
    _, weights, rho, terms = market(**policy)
    lost = [loss(one, clip=0.7, dimension=40).rho for one in terms]
    assert all(0 < a <= b for a, b in zip(lost, rho, strict=True))
    assert max(a / b for a, b in zip(lost, rho, strict=True)) > 1 - 1e-6
    # the continuous Gaussian's closed form: N = max 2Lλ/√(2ρ), shared among those who are counted on
    noise = max(1.4 * w / sqrt(2 * r) for w, r in zip(weights, rho, strict=True))
    threshold, honest = SecureAggregation(**policy).counts(12)
    assert terms[0].noise / terms[0].scale == pytest.approx(noise / sqrt(honest), rel=1e-5)
    assert (terms[0].threshold, terms[0].honest) == (threshold, honest)


def test_counts_by_hand() -> None:
    assert SecureAggregation(survivors=0.8, colluders=0.1).counts(20) == (16, 14)
    assert SecureAggregation(survivors=0.8).counts(3) == (3, 3)
    assert SecureAggregation(survivors=0.8).counts(100) == (80, 80)
    for survivors, colluders in ((0.5, 0.0), (0.6, 0.2), (0.9, 0.8)):  # two parts of the owners could each be enough
        with pytest.raises(InvalidInput, match="survivors"):
            SecureAggregation(survivors=survivors, colluders=colluders)


def discrete_gaussian(sigma: float, reach: int) -> np.ndarray:
    numbers = np.arange(-reach, reach + 1)
    chances = np.exp(-0.5 * (numbers / sigma) ** 2)
    return chances / chances.sum()


@pytest.mark.parametrize("sigma", [0.45, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("honest", [1, 2, 3, 5])
@pytest.mark.parametrize("shift", [1, 2, 5])
def test_the_bound_holds_for_the_exact_distribution(sigma: float, honest: int, shift: int) -> None:
    """One coordinate: Rényi divergences of the convolved pmf and its shift, at several orders, against ρα."""
    pmf = one = discrete_gaussian(sigma, int(18 * sigma) + 30)
    for _ in range(honest - 1):
        pmf = np.convolve(pmf, one)
    here, there = np.pad(pmf, (shift, 0)), np.pad(pmf, (0, shift))
    terms = SumTerms(weight=0.0, scale=1.0, noise=sigma, contributors=honest, threshold=honest, honest=honest)
    # a share of weight 0 has B² as rounding alone allows; scaled to the shift that is looked at
    bound = _rho(terms, squared=shift**2)
    # beyond this nothing counts, and the ends of the table would
    both = np.abs(np.arange(len(here)) - (len(here) - 1) / 2) <= 10 * sigma * sqrt(honest) + shift
    for order in (1.5, 2.0, 4.0):
        with np.errstate(divide="ignore"):
            terms_of_it = order * np.log(here[both]) + (1 - order) * np.log(np.maximum(there[both], 1e-300))
        divergence = float(logsumexp(terms_of_it)) / (order - 1)
        assert divergence <= bound * order * (1 + 1e-9)
    if honest == 1:  # then it is the discrete Gaussian's own, and tight (Canonne, Kamath, Steinke 2020, Theorem 14)
        assert bound == pytest.approx(shift**2 / (2 * sigma**2), rel=1e-9)


def _rho(terms: SumTerms, *, squared: float) -> float:
    from flmarket.privacy import secure_sum

    gap = secure_sum._not_gaussian(terms.noise, terms.honest)
    step = squared / (terms.honest * terms.noise**2)
    return min(step + gap / 2, (sqrt(step) + gap) ** 2) / 2


def test_loss_is_that_bound_at_twice_the_limit() -> None:
    terms = SumTerms(weight=0.3, scale=64.0, noise=5.0, contributors=5, threshold=4, honest=3)
    limit = squared_limit(terms, clip=1.0, dimension=10)
    assert limit >= (0.3 * 64) ** 2 + 10 / 4
    assert loss(terms, clip=1.0, dimension=10).rho == pytest.approx(4 * limit / (2 * 3 * 25), rel=1e-9)


def test_rounded_vectors_keep_the_limit_whatever_the_update() -> None:
    rng = np.random.default_rng(3)
    terms = SumTerms(weight=0.5, scale=20.0, noise=5.0, contributors=5, threshold=4, honest=3)
    limit = squared_limit(terms, clip=1.0, dimension=30)
    for scale in (1e-9, 1.0, 1e9):
        for _ in range(50):
            part = encode(rng.standard_normal(30) * scale, terms, clip=1.0, topic="x", source=Silence(rng))
            signed = part.astype(np.int64)
            signed = np.where(signed >= 2**31, signed - 2**32, signed)
            assert int(signed @ signed) <= limit


@pytest.mark.parametrize("source", ["fast", "secure"])
@pytest.mark.parametrize("scale", [0.8, 40.0, 5000.0])
def test_noise_is_discrete_gaussian(source: str, scale: float) -> None:
    made = SimulationNoise(np.random.default_rng(1)) if source == "fast" else SecureNoise()
    noise = made.whole_gaussian(4000, scale=scale)
    assert noise.dtype == np.int64
    # Kolmogorov-Smirnov against the rounded normal's distribution function, continuous enough at every point between
    grid = np.arange(-6, 7) * scale
    empirical = (noise[None, :] <= grid[:, None]).mean(axis=1)
    pmf = discrete_gaussian(scale, int(12 * scale))
    exact = np.array([pmf[: max(0, int(np.floor(g)) + int(12 * scale) + 1)].sum() for g in grid])
    assert np.abs(empirical - exact).max() < 2.2 / sqrt(4000)


def audited(sums_with: np.ndarray, sums_without: np.ndarray, *, rho: float, scale: float = 1.0) -> bool:
    """Whether an attacker who must tell two inputs apart does no better than ρ allows.

    The best test looks along the difference; its two normal-like distributions are μ = √(2ρ) deviations apart at most.
    The error sum of the threshold in the middle is then at least 2Φ(−μ/2), less what chance allows.
    """
    middle = (sums_with.mean() + sums_without.mean()) / 2
    wrong = (sums_with < middle).mean() + (sums_without >= middle).mean()
    allowed = 2 * norm.cdf(-sqrt(2 * rho) / 2)
    chance = 4 * sqrt(0.25 / len(sums_with)) * sqrt(2)
    return bool(wrong >= allowed - chance)


@pytest.mark.parametrize("cheat", [1.0, 0.5])
def test_an_audit_of_the_sum_rejects_half_the_noise(cheat: float) -> None:
    """One owner's two most distant updates, all others fixed; what the broker sees of the sum along the difference."""
    n, p, clip = 6, 8, 1.0
    rng = np.random.default_rng(11)
    weights, rho = [1 / n] * n, [2.0, *[4.0] * (n - 1)]
    terms = agreed(weights, rho, clip=clip, dimension=p, policy=SecureAggregation(survivors=1.0))
    planted = [replace(one, noise=one.noise * cheat) for one in terms]
    direction = np.zeros(p)
    direction[0] = clip
    others = rng.standard_normal((n - 1, p))

    def seen(own: np.ndarray) -> np.ndarray:
        out = []
        for _ in range(1500):
            total = total_of([own, *others], planted, clip=clip, source=SimulationNoise(rng))
            out.append(decode(total, terms[0], topic="t/0")[0])
        return np.array(out)

    sold = loss(terms[0], clip=clip, dimension=p).rho
    assert audited(seen(direction), seen(-direction), rho=sold) is (cheat == 1.0)


def test_wrap_around_never_happens_even_if_all_send_the_same() -> None:
    for n, p in ((3, 1), (20, 5), (50, 300)):
        terms = agreed([1 / n] * n, [0.02] * n, clip=2.0, dimension=p, policy=SecureAggregation())
        rng = np.random.default_rng(n)
        update = np.ones(p)
        total = total_of([update] * n, terms, clip=2.0, source=SimulationNoise(rng))
        found = decode(total, terms[0], topic="t/0")
        energy = noise_energy(terms[0], contributors=n, dimension=p)
        assert np.linalg.norm(found - clip_l2(update, 2.0)) < 6 * sqrt(energy)


def test_rho_and_epsilon_are_inverse_and_agree_with_a_peer() -> None:
    from dp_accounting import ZCDpEvent
    from dp_accounting.rdp import RdpAccountant

    epsilon = np.array([0.1, 0.5, 1.0, 2.0, 8.0, 30.0])
    rho = rho_of_epsilon(epsilon, delta=1e-6)
    back = epsilon_of_rho(rho, delta=1e-6)
    assert (back <= epsilon).all()
    assert back == pytest.approx(epsilon, rel=1e-9)
    for one, eps in zip(rho.tolist(), epsilon.tolist(), strict=True):
        peer = RdpAccountant().compose(ZCDpEvent(rho=one)).get_epsilon(1e-6)
        assert peer == pytest.approx(eps, rel=0.05)  # its grid of orders is coarser
        assert peer >= eps * (1 - 1e-3)  # where its grid is the finer one, not by more


def test_terms_survive_json_and_nonsense_does_not() -> None:
    _, _, _, terms = market()
    assert SumTerms.from_json(terms[3].to_json()) == terms[3]
    endless = json.dumps(json.loads(terms[0].to_json()) | {"weight": 10**400})
    for text in ("", "[]", "{}", terms[0].to_json().replace("threshold", "treshold"), '{"weight": 2}', endless):
        with pytest.raises(InvalidInput):
            SumTerms.from_json(text)
    with pytest.raises(InvalidInput, match="honest"):
        replace(terms[0], honest=terms[0].threshold + 1)
    assert isinstance(loss(terms[0], clip=1.0, dimension=40), ZCdp)
