"""Weight files: safetensors with the settings inside, and a JSON beside each that says how it came about.

Trained weights ship with the package, one file per auction and population; `load` also takes a path. Reading needs the
small library safetensors (extra `app`), never torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.auctions.learned.mechanism import LearnedAuction
from flmarket.auctions.learned.network import first_parameters
from flmarket.auctions.learned.settings import Settings
from flmarket.errors import ConfigError, MissingDependency, UnknownName

__all__ = ["load", "save", "weight_names"]

_SHIPPED = files("flmarket.auctions.learned") / "weights"
_SUFFIX = ".safetensors"


def weight_names(auction: str) -> tuple[str, ...]:
    """The populations that weights of this auction ship for."""
    start = f"{auction}-"
    found = (entry.name for entry in _SHIPPED.iterdir() if entry.name.endswith(_SUFFIX))
    return tuple(sorted(name.removeprefix(start).removesuffix(_SUFFIX) for name in found if name.startswith(start)))


def load(auction: str, weights: str, *, name: str | None = None) -> LearnedAuction:
    """An auction with shipped weights by population, or with those of a .safetensors file by path."""
    if weights.endswith(_SUFFIX):
        path = Path(weights)
    elif weights in weight_names(auction):
        path = Path(str(_SHIPPED / f"{auction}-{weights}{_SUFFIX}"))
    else:
        known = ", ".join(weight_names(auction)) or "none ship"
        raise UnknownName(f"weights of {auction}", weights, f"one of {known}, or a path to a {_SUFFIX} file")
    settings, parameters, provenance = _read(path)
    return LearnedAuction(settings, parameters, name or f"{auction}:{path.stem}", _source(provenance))


def _read(path: Path) -> tuple[Settings, dict[str, Any], dict[str, Any]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingDependency("safetensors", "app") from None
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            parameters = {key: file.get_tensor(key).astype(np.float64) for key in file.keys()}  # noqa: SIM118
        settings = Settings.from_dict(json.loads(about["settings"]))
        provenance = json.loads(about.get("provenance", "{}"))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ConfigError("weights", str(path), f"a file written by flmarket train-auction ({error})") from None
    wanted = {key: value.shape for key, value in first_parameters(settings, np.random.default_rng(0)).items()}
    found = {key: value.shape for key, value in parameters.items()}
    if wanted != found or not all(np.isfinite(value).all() for value in parameters.values()):
        raise ConfigError("weights", str(path), "finite tensors of the shapes that its settings ask for")
    return settings, parameters, provenance


def _source(provenance: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    audit = provenance.get("audit")
    trained = provenance.get("command", "weights of unknown origin")
    if not audit:
        return f"{trained}; regret not audited"
    return (
        f"{trained}; regret {audit['mean_regret_over_cost']:.3g} of cost on average under {audit['search']} search "
        f"of {audit['profiles']} profiles of {audit['population']} (docs/learned.md)"
    )


def save(
    path: Path, settings: Settings, parameters: Mapping[str, np.ndarray[Any, Any]], provenance: Mapping[str, Any]
) -> None:
    """Write weights, and the provenance beside them as JSON."""
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise MissingDependency("safetensors", "app") from None
    about = {"settings": json.dumps(settings.to_dict()), "provenance": json.dumps(dict(provenance))}
    arrays = {key: np.asarray(value, dtype=np.float32, order="C") for key, value in parameters.items()}
    save_file(arrays, path, metadata=about)
    shown = {**provenance, "settings": settings.to_dict()}
    path.with_suffix(".json").write_text(json.dumps(shown, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
