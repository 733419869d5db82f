"""Numbers that somebody else computes too: who, what, theirs, ours, and how far apart the two may be.

A peer that is installed computes its number here and now. Opacus, diffprivlib and ByzFL do not install beside the rest;
their numbers were computed once, each in an environment of its own, by the command that is named, and are pinned with
the version. docs/peers.md says where conventions differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flmarket import aggregation, privacy
from flmarket.aggregation import robust
from flmarket.games import Stackelberg
from flmarket.learning import Records, SoftmaxRegression
from flmarket.privacy import GaussianRelease, PrivacyAccount, ZCdp
from flmarket.privacy.composition import ApproxTotal


@dataclass(frozen=True)
class Value:
    """One number of a peer's. `bound`: theirs is an upper bound, at most `rtol` above ours."""

    peer: str
    what: str
    theirs: Callable[[], Any]
    ours: Callable[[], Any]
    rtol: float = 1e-9
    bound: bool = False

    def agrees(self, ours: Any = None) -> bool:
        """Whether the two agree; `ours` instead of what is computed."""
        theirs, mine = np.asarray(self.theirs(), float), np.asarray(self.ours() if ours is None else ours, float)
        if self.bound and not (mine <= theirs * (1 + 1e-9)).all():
            return False
        return bool(np.allclose(mine, theirs, rtol=self.rtol, atol=self.rtol * float(np.abs(theirs).max())))


# --- differential privacy

# pip install opacus==1.6.0; RDPAccountant and PRVAccountant with history [(σ, 1.0, steps)], then get_epsilon(δ)
OPACUS = "Opacus 1.6.0"
_OPACUS = (
    (1.0, 1, 1e-5, 4.728507067217623, 4.387413787977018),
    (2.0, 10, 1e-5, 8.079406222420491, 7.521641007073685),
    (4.0, 100, 1e-6, 15.32798402653992, 14.461292034530064),
    (0.8, 3, 1e-5, 11.819742782514052, 11.038390387519916),
    (10.0, 500, 1e-7, 14.357660063788538, 13.621725593122994),
    (1.0, 20, 1e-6, 32.23843939256122, 30.589794362037942),
)
# pip install diffprivlib==0.6.6; mechanisms.GaussianAnalytic and Gaussian(ε, δ, sensitivity=2)._scale, Laplace.variance
DIFFPRIVLIB = "diffprivlib 0.6.6"
_DIFFPRIVLIB = (
    (0.1, 1e-5, 61.499132263945576, 96.89610525210777, 800.0),
    (0.5, 1e-5, 14.063653351163971, 19.379221050421556, 32.0),
    (0.9, 1e-6, 9.317692955193221, 11.775116726334385, 9.876543209876544),
    (1.0, 1e-5, 7.461263269629647, 9.689610525210778, 8.0),
    (2.0, 1e-6, 4.4609525423457335, None, 2.0),
    (5.0, 1e-7, 2.1241241323032654, None, 0.32),
    (10.0, 1e-5, 0.9997772398519249, None, 0.08),
)
# apple/ml-projunit: the error of PrivUnitG a dimension, as printed for d → ∞
PROJUNIT = "apple/ml-projunit"
_PROJUNIT = {0.5: 25.21, 1.0: 6.333, 2.0: 1.615, 4.0: 0.436, 8.0: 0.1329}


def _gaussian(sigma: float, steps: int, delta: float) -> float:
    return ApproxTotal().plus(GaussianRelease(sigma), steps).epsilon(delta)


def _renyi(sigma: float, steps: int, delta: float) -> float:
    """Of the Rényi curve alone, on the orders that Opacus has too."""
    orders = np.array([1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64)))
    slack = np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float((steps * orders / (2 * sigma**2) + slack).min()))


def opacus() -> list[Value]:
    found = []
    for sigma, steps, delta, renyi, exact in _OPACUS:
        what = f"σ {sigma:g}, {steps} steps, δ {delta:g}"
        at = (sigma, steps, delta)
        found.append(Value(OPACUS, f"RDP, {what}", lambda r=renyi: r, lambda a=at: _renyi(*a)))
        found.append(Value(OPACUS, f"PRV, {what}", lambda e=exact: e, lambda a=at: _gaussian(*a), 5e-3, bound=True))
    return found


def diffprivlib() -> list[Value]:
    found = []
    for epsilon, delta, analytic, classic, variance in _DIFFPRIVLIB:
        at, what = {"epsilon": epsilon, "delta": delta, "sensitivity": 2.0}, f"ε {epsilon:g}, δ {delta:g}"
        found.append(
            Value(DIFFPRIVLIB, f"analytic σ, {what}", lambda v=analytic: v,
                  lambda a=at: privacy.analytic_gaussian_sigma(**a), 1e-8)
        )  # fmt: skip
        if classic is not None:
            found.append(
                Value(DIFFPRIVLIB, f"classic σ, {what}", lambda v=classic: v,
                      lambda a=at: privacy.classic_gaussian_sigma(**a))
            )  # fmt: skip
        found.append(
            Value(DIFFPRIVLIB, f"Laplace variance, ε {epsilon:g}", lambda v=variance: v,
                  lambda e=epsilon: privacy.LaplaceL1(clip=1.0).noise_energy(e, 1))
        )  # fmt: skip
    return found


def projunit() -> list[Value]:
    many = 100_000
    return [
        Value(PROJUNIT, f"error a dimension, ε {epsilon:g}", lambda e=energy: e,
              lambda e=epsilon: privacy.PrivUnitG(clip=1.0).noise_energy(e, many) / many, 0.02)
        for epsilon, energy in _PROJUNIT.items()
    ]  # fmt: skip


def dp_accounting() -> list[Value]:
    import dp_accounting
    from dp_accounting import pld, rdp

    name, found = "dp-accounting 0.6.0", []

    def theirs(accountant: Any, event: Any, delta: float) -> float:
        accountant.compose(event)
        return float(accountant.get_epsilon(delta))

    add = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    for sigma, steps, delta in ((1.0, 1, 1e-5), (3.0, 25, 1e-6), (8.0, 200, 1e-5)):
        event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(sigma), steps)
        found.append(
            Value(name, f"PLD of Gaussian noise, σ {sigma:g} × {steps}",
                  lambda e=event, d=delta: theirs(pld.PLDAccountant(add), e, d),
                  lambda a=(sigma, steps, delta): _gaussian(*a), 1e-3, bound=True)
        )  # fmt: skip
    for rho, delta in ((0.1, 1e-5), (0.5, 1e-6), (2.0, 1e-6)):
        found.append(
            Value(name, f"RDP of ρ {rho:g}, δ {delta:g}",
                  lambda r=rho, d=delta: theirs(rdp.RdpAccountant(), dp_accounting.ZCDpEvent(r), d),
                  lambda r=rho, d=delta: ApproxTotal().plus(ZCdp(r), 1).epsilon(d), 5e-3)
        )  # fmt: skip
    return found


def opendp() -> list[Value]:
    import opendp.prelude as dp

    dp.enable_features("contrib")
    name, found = "OpenDP 0.16", []
    line = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)
    for scale in (0.5, 2.0, 10.0):
        found.append(
            Value(name, f"Laplace of scale {scale:g}: ε at sensitivity 2",
                  lambda s=scale: dp.m.make_laplace(*line, scale=s).map(2.0),
                  lambda s=scale: np.sqrt(8.0 / _laplace_energy_at(s)), 1e-6)
        )  # fmt: skip
    for scale, delta in ((2.0, 1e-6), (5.0, 1e-5), (1.0, 1e-7)):

        def theirs(s: float = scale, d: float = delta) -> float:
            noised = dp.m.make_gaussian(*line, scale=s)
            return float(dp.c.make_zCDP_to_approxDP(noised).map(2.0).epsilon(d))

        found.append(Value(name, f"Gaussian of scale {scale:g}: ρ at sensitivity 2",
                           lambda s=scale: dp.m.make_gaussian(*line, scale=s).map(2.0),
                           lambda s=scale: _spent(ZCdp(1e6), GaussianRelease(s / 2)), 1e-6))  # fmt: skip
        found.append(Value(name, f"ε of that ρ at δ {delta:g}", theirs,
                           lambda a=(scale, delta): ApproxTotal().plus(ZCdp(2 / a[0] ** 2), 1).epsilon(a[1]),
                           5e-3))  # fmt: skip
    return found


def _spent(cap: Any, event: Any) -> float:
    account = PrivacyAccount(cap)
    account.compose(event)
    return account.spent


def _laplace_energy_at(scale: float) -> float:
    """2·scale² by our own mechanism, asked for the ε that this scale is."""
    return float(privacy.LaplaceL1(clip=1.0).noise_energy(2.0 / scale, 1))


def mpmath() -> list[Value]:
    import mpmath as mp

    def delta(sigma: float, epsilon: float) -> float:
        with mp.workdps(60):
            s, e = mp.mpf(sigma), mp.mpf(epsilon)
            return float(mp.ncdf(1 / (2 * s) - e * s) - mp.e**e * mp.ncdf(-1 / (2 * s) - e * s))

    cases = ((1.0, 1.0), (0.5, 3.0), (4.0, 0.2), (10.0, 1.0), (0.1, 80.0), (2.0, 4.0))
    return [
        Value("mpmath 1.3, 60 digits", f"δ of Gaussian noise σ {s:g} at ε {e:g}", lambda a=(s, e): delta(*a),
              lambda a=(s, e): privacy.gaussian_delta(sigma=a[0], epsilon=a[1]), 1e-9)
        for s, e in cases
    ]  # fmt: skip


# --- aggregation

# pip install byzfl==0.0.11; AGGREGATOR(f=…)(x) on default_rng(0).normal(size=(9, 4)), row 0 + 50, row 1 − 30
BYZFL = "ByzFL 0.0.11"
_BYZFL: dict[str, tuple[dict[str, Any], list[float]]] = {
    "median": ({}, [-0.45772582566733916, 0.09401229776087457, -0.6651946734866135, 0.0413259793472436]),
    "trimmed-mean": (
        {"adversaries": 2},
        [-0.3986959434380307, 0.06399223712300625, -0.5653854892820338, -0.03864683421899601],
    ),
    "krum": ({"adversaries": 2}, [-0.45772582566733916, 0.2201951234700494, -1.009618183538736, -0.20917557487171307]),
    "multi-krum": (
        {"adversaries": 2},
        [-0.4878629014538828, 0.06014331215980926, -0.5230296938984431, -0.010349453987245976],
    ),
    "average": ({}, [1.7972245041950115, 2.2944992640818715, 2.0314683153649247, 2.3310594335968395]),
}


# its GeometricMedian() stops after three steps, so this is no median yet
BYZFL_GEOMETRIC_MEDIAN = [-0.3969318010645705, 0.15003284137175743, -0.4989312670642755, 0.04089164346771578]


def uploads() -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(9, 4))
    x[0] += 50
    x[1] -= 30
    return x


def _combined(name: str, settings: dict[str, Any]) -> np.ndarray:
    return robust.get(name, **settings).combine(uploads(), np.ones(9)).average


def byzfl() -> list[Value]:
    return [
        Value(BYZFL, name, lambda v=vector: v, lambda a=(name, settings): _combined(*a))
        for name, (settings, vector) in _BYZFL.items()
    ]


def flower() -> list[Value]:
    from flwr.server.strategy import aggregate as theirs

    results = [([row.copy()], 1) for row in uploads()]
    return [
        Value("Flower 1.41", "median", lambda: theirs.aggregate_median(results)[0], lambda: _combined("median", {})),
        Value("Flower 1.41", "Krum, f = 2", lambda: theirs.aggregate_krum(results, 2, 0)[0],
              lambda: _combined("krum", {"adversaries": 2})),
        Value("Flower 1.41", "trimmed mean, 2 of 9", lambda: theirs.aggregate_trimmed_avg(results, 2 / 9 + 1e-9)[0],
              lambda: _combined("trimmed-mean", {"adversaries": 2})),
    ]  # fmt: skip


def cvxpy() -> list[Value]:
    import cvxpy as cp

    def optimal(epsilon: np.ndarray, size: np.ndarray) -> float:
        share, lam = size / size.sum(), cp.Variable(len(size))
        # FL-Market's bound with clip 1 in one dimension: noise, and the bias of weights that are not the shares
        noise = cp.sum(cp.multiply(8.0 / epsilon**2, cp.square(lam)))
        problem = cp.Problem(cp.Minimize(noise + cp.square(cp.norm1(lam - share))), [lam >= 0, cp.sum(lam) == 1])
        return float(problem.solve(solver="CLARABEL"))

    def ours(epsilon: np.ndarray, size: np.ndarray) -> float:
        weights = aggregation.get("opt-aggr").weights(epsilon, size)
        return float(aggregation.error_bound(weights, epsilon, size))

    def median(x: np.ndarray) -> float:
        point = cp.Variable(x.shape[1])
        away = cp.sum(cp.norm(x - cp.reshape(point, (1, x.shape[1]), order="C"), 2, axis=1))
        return float(cp.Problem(cp.Minimize(away)).solve(solver="CLARABEL"))

    found, rng = [], np.random.default_rng(5)
    for n in (2, 3, 5, 8, 12):
        case = rng.uniform(0.3, 4.0, n), rng.integers(1, 40, n).astype(float)
        found.append(Value("cvxpy 1.9", f"least error bound of {n} owners", lambda c=case: optimal(*c),
                           lambda c=case: ours(*c), 1e-5))  # fmt: skip
    for n in (5, 9):
        x = rng.normal(size=(n, 3))
        found.append(
            Value("cvxpy 1.9", f"distances to the geometric median of {n}", lambda x=x: median(x), lambda x=x: float(
                np.linalg.norm(x - robust.get("geometric-median").combine(x, np.ones(len(x))).average, axis=1).sum()
            ), 1e-6)
        )  # fmt: skip
    return found


# --- learning and games


def _points(classes: int) -> tuple[SoftmaxRegression, Records, np.ndarray]:
    rng = np.random.default_rng(classes)
    model, data = SoftmaxRegression(4, classes, 0.05), Records(rng.normal(size=(60, 4)), rng.integers(0, classes, 60))
    return model, data, rng.normal(size=sum(int(np.prod(shape)) for shape in model.tensors.values()))


def _logits(model: SoftmaxRegression, data: Records, parameters: np.ndarray) -> np.ndarray:
    """Written out: a row of weights a class and a bias each; two classes have one row."""
    outputs = model.outputs
    weights, bias = parameters[: 4 * outputs].reshape(_shape(model)), parameters[4 * outputs :]
    scores = data.x @ (weights if weights.shape[0] == 4 else weights.T) + bias
    return np.hstack([np.zeros((len(scores), 1)), scores]) if outputs == 1 else scores


def _shape(model: SoftmaxRegression) -> tuple[int, ...]:
    shape = next(iter(model.tensors.values()))
    return shape if len(shape) == 2 else (*shape, 1)


def sklearn() -> list[Value]:
    from scipy.special import softmax
    from sklearn import metrics

    found = []
    for classes in (2, 3, 5):
        model, data, at = _points(classes)
        chance = softmax(_logits(model, data, at), axis=1)
        said = model.evaluate(at, data)
        cases = {
            "log loss": (
                metrics.log_loss(data.y, chance, labels=list(range(classes))),
                said["loss"] - _penalty(model, at),
            ),
            "accuracy": (metrics.accuracy_score(data.y, chance.argmax(axis=1)), said["accuracy"]),
            "balanced accuracy": (
                metrics.balanced_accuracy_score(data.y, chance.argmax(axis=1)),
                said["balanced_accuracy"],
            ),
        }
        for what, (theirs, ours) in cases.items():
            found.append(Value("scikit-learn 1.9", f"{what}, {classes} classes", lambda v=theirs: v, lambda v=ours: v))
    return found


def _penalty(model: SoftmaxRegression, parameters: np.ndarray) -> float:
    weights = parameters[: 4 * model.outputs]
    said = model.evaluate(parameters, _points(model.outputs if model.outputs > 1 else 2)[1])["loss"]
    whole = model.loss(parameters, *vars(_points(model.outputs if model.outputs > 1 else 2)[1]).values())
    return 0.05 / 2 * float(weights @ weights) if np.isclose(said, whole) else 0.0


def torch() -> list[Value]:
    import torch as t

    def gradient(classes: int) -> np.ndarray:
        model, data, at = _points(classes)
        point = t.tensor(at, requires_grad=True)
        outputs = model.outputs
        weights, bias = point[: 4 * outputs].reshape(_shape(model)), point[4 * outputs :]
        scores = t.tensor(data.x) @ (weights if weights.shape[0] == 4 else weights.T) + bias
        if outputs == 1:
            scores = t.hstack([t.zeros((len(scores), 1), dtype=scores.dtype), scores])
        loss = t.nn.functional.cross_entropy(scores, t.tensor(data.y)) + 0.05 / 2 * (point[: 4 * outputs] ** 2).sum()
        loss.backward()
        return point.grad.numpy()

    def ours(classes: int) -> np.ndarray:
        from flmarket.learning import updates

        model, data, at = _points(classes)
        return updates(model, at, [data], [np.random.default_rng(0)])[0]

    return [
        Value("PyTorch 2.13", f"gradient, {classes} classes", lambda c=classes: gradient(c), lambda c=classes: ours(c))
        for classes in (2, 3, 5)
    ]


def scipy() -> list[Value]:
    from scipy.optimize import minimize_scalar

    found = []
    for seed in range(3):
        values = np.random.default_rng(seed).uniform(1.0, 3.0, 5)
        game = Stackelberg(values, records=20, dimension=3, rounds=10, learning_rate=0.1, weight=20.0)
        rho = game.equilibrium(2.0)
        who = int(np.argmax(rho))

        def reply(game: Stackelberg = game, rho: np.ndarray = rho, who: int = who) -> float:
            """What the keenest user would do, given the others."""

            def loss(mine: float) -> float:
                return -float(game.user_utilities(np.where(np.arange(5) == who, mine, rho), 2.0)[who])

            return float(minimize_scalar(loss, bounds=(1e-9, 5.0), method="bounded", options={"xatol": 1e-10}).x)

        found.append(Value("SciPy 1.17", f"best reply at the equilibrium, game {seed}", reply,
                           lambda rho=rho: float(rho.max()), 1e-4))  # fmt: skip
    return found


def every() -> list[Value]:
    """All of them."""
    peers = (opacus, diffprivlib, projunit, dp_accounting, opendp, mpmath, byzfl, flower, cvxpy, sklearn, torch, scipy)
    return [value for peer in peers for value in peer()]
