"""A model one can use: weights, what they mean, what they were trained on and what that cost, in one zip.

    model.json            what the model is, names of features and classes, how raw columns become features, the rule
    weights.safetensors   the last model; best.safetensors the best one, where validation records told which that is
    card.json             task, mechanism, privacy, accuracy beside the baseline, bill; MODEL_CARD.md says it in words
    receipts.json         the ledger's receipts of what was bought, and its head
    predict.py            raw records in, classes out, with NumPy alone (`predict`, this package's own module)

Scaling and encoding belong to the data, and a model is of no use without them, so they travel with it. `predict` has
the format, its limits and its checks; here is what needs the package: writing one, and networks. A network is built by
the reader's own registry (`travel.built`), so a file from a stranger runs no code: a model that says
`package.module:build` needs the reader's leave for exactly that name.

What would break it: a data set whose loader scales by itself and has no `Encoding`; its model takes records as that
loader makes them, and the manifest says so (`encoding` is null).
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import ConfigError, FlmarketError, InvalidInput, MissingDependency
from flmarket.learning import predict as standalone
from flmarket.learning.data import DataSet
from flmarket.learning.data.files import read_csv, read_table
from flmarket.learning.model import Model, SoftmaxRegression
from flmarket.learning.travel import built, described, from_named, to_named

# As old as a zip can say, so that the same model is the same bytes.
_STAMP = (1980, 1, 1, 0, 0, 0)


def pack(
    model: Model,
    data: DataSet,
    *,
    last: FloatArray,
    best: FloatArray | None = None,
    card: Mapping[str, Any],
    text: str,
    receipts: Mapping[str, Any] | None = None,
) -> bytes:
    """The zip. `best` is what to use if it is there, else `last`; both are parameter vectors of the model."""
    try:
        saying = json.loads(described(model))
    except FlmarketError:  # an object that no registry made: its weights go, and whoever has it can use them
        saying = None
    softmax = type(model) is SoftmaxRegression
    about = {
        "format": standalone.FORMAT,
        "version": standalone.VERSION,
        "model": saying,
        "tensors": {name: list(shape) for name, shape in model.tensors.items()},
        "features": list(data.feature_names),
        "shape": list(data.shape),
        "classes": list(data.classes),
        "encoding": None if data.encoding is None else data.encoding.to_dict(),
        "rule": standalone.ABOVE_ZERO if softmax and data.n_classes == 2 else standalone.LARGEST,
        "use": "last" if best is None else "best",
    }
    files: dict[str, str | bytes] = {
        standalone.ABOUT: json.dumps(about, ensure_ascii=False, allow_nan=False, indent=1),
        standalone.LAST: _saved(model, last),
        standalone.CARD: json.dumps(card, ensure_ascii=False, allow_nan=False, indent=1),
        standalone.TEXT: text,
        standalone.SCRIPT: Path(standalone.__file__).read_text(encoding="utf-8"),
    }
    if best is not None:
        files[standalone.BEST] = _saved(model, best)
    if receipts is not None:
        files[standalone.RECEIPTS] = json.dumps(receipts, ensure_ascii=False, allow_nan=False)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _STAMP), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _saved(model: Model, parameters: FloatArray) -> bytes:
    try:
        from safetensors.numpy import save
    except ImportError:
        raise MissingDependency("safetensors", "app") from None
    return bytes(save(to_named(model, parameters)))


@dataclass(frozen=True, eq=False)
class Bundle:
    """A model that was read and checked. `about` is model.json, `card` what it says of itself."""

    files: Mapping[str, bytes]
    about: Mapping[str, Any]
    card: Mapping[str, Any]
    allow: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | PathLike[str], *, allow: Collection[str] = ()) -> Bundle:
        """A zip, a folder of its files, or one that has a model.zip. `allow`: models by path that may be imported."""
        place = Path(path)
        if place.is_dir() and not (place / standalone.ABOUT).exists() and (place / "model.zip").exists():
            place = place / "model.zip"
        try:
            files = standalone.read_files(place)
            about = standalone.read_about(files)
            for name in (standalone.LAST, standalone.BEST):
                if name in files:
                    standalone.read_tensors(files[name], about["tensors"], name)
            card = standalone.read_json(files[standalone.CARD], standalone.CARD) if standalone.CARD in files else {}
        except standalone.Refused as problem:
            raise _typed(problem) from None
        return cls(files, about, card, tuple(allow))

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(self.about["classes"])

    def weights(self, which: str | None = None) -> dict[str, NDArray[Any]]:
        """Named arrays of a checkpoint, by default of the one to use."""
        name = {"last": standalone.LAST, "best": standalone.BEST}.get(which or self.about["use"], "")
        if name not in self.files:
            raise InvalidInput("checkpoint", which, "last, or best where there is one")
        return standalone.read_tensors(self.files[name], self.about["tensors"], name)

    def predict(self, records: Mapping[str, NDArray[Any]] | NDArray[Any], which: str | None = None) -> IntArray:
        """The number of each raw record's class; records are columns by name, or an array of numbers."""
        try:
            x = standalone.encode(dict(self.about), records if isinstance(records, np.ndarray) else dict(records))
            named = self.weights(which)
            if self.about["model"] is not None and self.about["model"]["name"] == "softmax":
                return standalone.decide(self.about["rule"], standalone.softmax_scores(named, x))
            return network_classes(self.about, named, x, self.allow)
        except standalone.Refused as problem:
            raise _typed(problem) from None

    def right(self, labels: NDArray[Any], answers: IntArray) -> NDArray[np.bool_]:
        """Which answers are the class that a column of labels says."""
        try:
            return standalone.right(list(self.classes), labels, answers)
        except standalone.Refused as problem:
            raise _typed(problem) from None


def read_raw(path: str | PathLike[str]) -> dict[str, NDArray[Any]] | NDArray[Any]:
    """Raw records: columns of a CSV or Parquet file, or the array of an npz."""
    if str(path).endswith(".parquet"):
        return read_table(Path(path))
    if str(path).endswith(".gz"):
        return dict(read_csv(Path(path), None, least=1))
    try:
        return standalone.read_records(path)
    except standalone.Refused as problem:
        raise _typed(problem) from None


def network_classes(
    about: Mapping[str, Any], named: Mapping[str, NDArray[Any]], x: FloatArray, allow: Sequence[str] = ()
) -> IntArray:
    """The classes by a model that this machine's registry builds; a stranger's text runs nothing by itself."""
    if about["model"] is None:
        raise InvalidInput("model", "no description", "one that a registry made; load its weights into your own object")
    text = json.dumps(about["model"], sort_keys=True, separators=(",", ":"))
    model = built(text, allow=allow)
    answers = getattr(model, "predict", None)
    if answers is None:
        raise InvalidInput("model", type(model).__name__, "a model with predict(parameters, x)")
    return np.asarray(answers(from_named(model, named), x))


def _typed(problem: standalone.Refused) -> ConfigError:
    return ConfigError(problem.field, problem.value, problem.accepted)
