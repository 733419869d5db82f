"""Privacy: clip and randomise updates, select privately, and account for what was given away.

A perturbation is built by name, `get("laplace-l1", clip=1.0)`. Each knows its guarantee and noise energy. The
account belongs to one owner and refuses a release that would pass her cap. Every ε here is for one owner's
whole update and for one release, unless it is an account's total, or says that it is for a record (`RecordLevel`).
"""

from __future__ import annotations

from flmarket.privacy import exponential
from flmarket.privacy.accountant import PrivacyAccount
from flmarket.privacy.additive import DistributedGaussian, GaussianL2, GaussianZCdp, LaplaceL1, RecordNoise
from flmarket.privacy.composition import (
    analytic_gaussian_sigma,
    classic_gaussian_sigma,
    epsilon_of_rho,
    gaussian_delta,
    gaussian_epsilon,
    numerical_epsilon,
    rho_of_epsilon,
)
from flmarket.privacy.directional import PrivUnit, PrivUnitG, ProjUnit, Sketch, Sphere
from flmarket.privacy.events import (
    ROUNDING_ALLOWANCE,
    ApproxDp,
    Cap,
    Event,
    ExponentialRelease,
    GaussianRelease,
    PureDp,
    RecordLevel,
    Uncapped,
    Unit,
    Unprotected,
    ZCdp,
    cap_from_dict,
    event_from_dict,
    event_to_dict,
    unit_of,
)
from flmarket.privacy.noise import NoiseSource, SecureNoise, SimulationNoise, as_noise_source
from flmarket.privacy.perturbation import Perturbation, UnsoundNoise, clip_l1, clip_l2, is_sound, signal_to_noise
from flmarket.privacy.recommend import Recommendation, energy_table, recommend
from flmarket.registry import Registry

__all__ = [
    "ROUNDING_ALLOWANCE",
    "ApproxDp",
    "Cap",
    "DistributedGaussian",
    "Event",
    "ExponentialRelease",
    "GaussianL2",
    "GaussianRelease",
    "GaussianZCdp",
    "LaplaceL1",
    "NoiseSource",
    "Perturbation",
    "PrivUnit",
    "PrivUnitG",
    "PrivacyAccount",
    "ProjUnit",
    "PureDp",
    "Recommendation",
    "RecordLevel",
    "RecordNoise",
    "SecureNoise",
    "SimulationNoise",
    "Sketch",
    "Sphere",
    "Uncapped",
    "Unit",
    "Unprotected",
    "UnsoundNoise",
    "ZCdp",
    "about",
    "admit",
    "analytic_gaussian_sigma",
    "as_noise_source",
    "cap_from_dict",
    "classic_gaussian_sigma",
    "clip_l1",
    "clip_l2",
    "energy_table",
    "epsilon_of_rho",
    "event_from_dict",
    "event_to_dict",
    "exponential",
    "gaussian_delta",
    "gaussian_epsilon",
    "get",
    "is_sound",
    "names",
    "numerical_epsilon",
    "recommend",
    "register",
    "rho_of_epsilon",
    "signal_to_noise",
    "unit_of",
]

_REGISTRY: Registry[Perturbation] = Registry("perturbation", "flmarket.perturbations", spoken=True)
for _mechanism in (LaplaceL1, GaussianL2, GaussianZCdp, DistributedGaussian, Sphere, PrivUnit, PrivUnitG, ProjUnit):
    _REGISTRY.register(_mechanism.name, _mechanism)

names = _REGISTRY.names
register = _REGISTRY.register
admit = _REGISTRY.admit
about = _REGISTRY.about
get = _REGISTRY.get
