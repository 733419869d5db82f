"""Learned auctions: this project's networks under names of their own, and the papers' as printed under theirs.

`cleared-menu` and its kin (`mechanism.py`) serve any number of owners, never pay below cost and have small regret.
`regretnet`, `m-regretnet`, `dm-regretnet` and `murba` (`papers.py`) are what FL-Market 2021 and 2022 print.

Weight files: safetensors with the settings inside, and a JSON beside each that says how it came about.

Trained weights ship with the package, `weights/AUCTION/POPULATION.safetensors`; `load` also takes a path. Reading needs
the small library safetensors (extra `app`), never torch.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.auctions.learned.mechanism import LearnedAuction
from flmarket.auctions.learned.network import Settings, first_parameters
from flmarket.auctions.learned.papers import FAMILY, SHAPES, PaperAuction, PaperSettings
from flmarket.auctions.learned.papers import first_parameters as paper_parameters
from flmarket.errors import ConfigError, UnknownName, needed

__all__ = [
    "DEFAULTS", "PAPERS", "LearnedAuction", "PaperAuction", "PaperSettings", "Settings",
    "audited", "learned_auction", "load", "save", "weight_names",
]  # fmt: skip

# the weights that a bare name stands for: this project's networks
DEFAULTS = {
    "cleared-menu": "flm22-iid",
    "cleared-menu-20": "flm21-low",
    "cleared-menu-convl": "flm22-iid",
    "menu-lottery": "flm22-iid",
    "single-lottery": "flm22-iid",
}
# and the papers'
PAPERS = {
    "regretnet": "flm22-iid",
    "m-regretnet": "flm22-iid",
    "dm-regretnet": "flm22-iid",
    "dm-regretnet-convl": "flm22-iid",
    "murba": "flm21-low",
    "murba-15": "flm21-low",
    "murba-10": "flm21-low",
}


def learned_auction(auction: str, weights: str | None = None) -> LearnedAuction | PaperAuction:
    """The auction with its default weights, with those of another population, or with those of a file."""
    default = (DEFAULTS | PAPERS)[auction]
    chosen = default if weights is None else weights
    found = load(auction, chosen, name=auction if chosen == default else f"{auction}:{chosen}")
    if isinstance(found, LearnedAuction):
        if auction in PAPERS:  # files from when these were names of this project's networks
            warnings.warn(
                f"{chosen} holds a network of this project's, which used to be called {auction}; {auction} is the "
                f"paper's mechanism now. Say what it is instead, of {', '.join(DEFAULTS)}.",
                FutureWarning,
                stacklevel=4,
            )
        return found
    # the same mechanism, for whatever number of owners and width of network
    owners, hidden = found.settings.owners, found.settings.hidden
    if auction not in PAPERS or found.settings != replace(SHAPES[auction], owners=owners, hidden=hidden):
        raise ConfigError("weights", chosen, f"a network of {auction}; this is another one, of the papers'")
    return found


_SHIPPED = files("flmarket.auctions.learned") / "weights"
_SUFFIX = ".safetensors"


def weight_names(auction: str) -> tuple[str, ...]:
    """The populations that weights of this auction ship for."""
    folder = _SHIPPED / auction
    if not folder.is_dir():
        return ()
    return tuple(sorted(e.name.removesuffix(_SUFFIX) for e in folder.iterdir() if e.name.endswith(_SUFFIX)))


def load(auction: str, weights: str, *, name: str | None = None) -> LearnedAuction | PaperAuction:
    """An auction with shipped weights by population, or with those of a .safetensors file by path."""
    if weights.endswith(_SUFFIX):
        path = Path(weights)
    elif weights in weight_names(auction):
        path = Path(str(_SHIPPED / auction / f"{weights}{_SUFFIX}"))
    else:
        known = ", ".join(weight_names(auction)) or "none ship"
        raise UnknownName(
            f"weights of {auction}",
            weights,
            f"one of {known}, or a path to a {_SUFFIX} file; to train them: flmarket train-auction {auction} "
            f"--population {weights} --out FILE{_SUFFIX}",
        )
    settings, parameters, provenance = _read(path)
    called, source = name or f"{auction}:{path.stem}", _source(provenance)
    if isinstance(settings, PaperSettings):
        return PaperAuction(settings, parameters, called, source, provenance)
    return LearnedAuction(settings, parameters, called, source)


def _read(path: Path) -> tuple[Settings | PaperSettings, dict[str, Any], dict[str, Any]]:
    with needed("app", "safetensors"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            parameters = {key: file.get_tensor(key).astype(np.float64) for key in file.keys()}  # noqa: SIM118
        values = json.loads(about["settings"])
        settings = (PaperSettings if values.get("family") == FAMILY else Settings).from_dict(values)
        provenance = json.loads(about.get("provenance", "{}"))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ConfigError("weights", str(path), f"a file written by flmarket train-auction ({error})") from None
    drawn = np.random.default_rng(0)
    first = (
        paper_parameters(settings, drawn) if isinstance(settings, PaperSettings) else first_parameters(settings, drawn)
    )
    wanted = {key: value.shape for key, value in first.items()}
    found = {key: value.shape for key, value in parameters.items()}
    if wanted != found or not all(np.isfinite(value).all() for value in parameters.values()):
        raise ConfigError("weights", str(path), "finite tensors of the shapes that its settings ask for")
    return settings, parameters, provenance


def _source(provenance: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    audit = provenance.get("audit")
    trained = provenance.get("command", "weights of unknown origin")
    if "iterations" in provenance:
        trained += f", {provenance['iterations']:,} of {provenance['scheduled']:,} iterations"
    if not audit:
        return f"{trained}; regret not audited"
    sure = audit.get("certificate") or {}
    bound = sure.get("regret")
    certified = "" if bound is None else f", in a new profile above {bound:.3g} with probability ≤ {sure['alpha']:.0%}"
    return (
        f"{trained}; regret {audit['mean_regret_over_cost']:.3g} of cost on average{certified} under {audit['search']} "
        f"search of {audit['profiles']} profiles of {audit['population']} (docs/learned.md)"
    )


def save(
    path: Path,
    settings: Settings | PaperSettings,
    parameters: Mapping[str, np.ndarray[Any, Any]],
    provenance: Mapping[str, Any],
) -> None:
    """Write weights, and the provenance beside them as JSON."""
    with needed("app", "safetensors"):
        from safetensors.numpy import save_file
    about = {"settings": json.dumps(settings.to_dict()), "provenance": json.dumps(dict(provenance))}
    arrays = {key: np.asarray(value, dtype=np.float32, order="C") for key, value in parameters.items()}
    save_file(arrays, path, metadata=about)
    shown = {**provenance, "settings": settings.to_dict()}
    path.with_suffix(".json").write_text(json.dumps(shown, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def audited(path: Path, figures: Mapping[str, Any]) -> None:
    """Keep the figures of an audit with the weights that it was of, in place of those of a former one."""
    settings, parameters, provenance = _read(path)
    save(path, settings, parameters, {**provenance, "audit": dict(figures)})
