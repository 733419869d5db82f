"""A model on its way to another machine: as a text, as named arrays, and as a zip that its buyer can use.

`described` writes a model that came from the registry as one line of JSON: the name, features, classes and shape, the
settings, the local training. `built` makes it again from the registry of the machine that reads it, so nothing that a
stranger writes is run: a name is one that was registered there, and `package.module:Name` is only taken from a list
of the reader's own. Each model has one text, and a text that is not exactly what `described` says of the model that was
built from it is refused. Sizes are counted while a network is built, and building ends before it is too large.

What would break it: a factory of the same name that builds something else there (only features and classes are
compared), and one that opens files that a setting names: its settings then come from a stranger.

A model one can use: weights, what they mean, what they were trained on and what that cost, in one zip.

    model.json            what the model is, names of features and classes, how raw columns become features, the rule
    weights.safetensors   the last model; best.safetensors the best one, where validation records told which that is
    card.json             task, mechanism, privacy, accuracy beside the baseline, bill; MODEL_CARD.md says it in words
    receipts.json         the ledger's receipts of what was bought, and its head
    predict.py            raw records in, classes out, with NumPy alone (`predict`, this package's own module)

Scaling and encoding belong to the data, and a model is of no use without them, so they travel with it. `predict` has
the format, its limits and its checks; here is what needs the package: writing one, and networks. A network is built by
the reader's own registry (`built`), so a file from a stranger runs no code: a model that says
`package.module:build` needs the reader's leave for exactly that name.

What would break it: a data set whose loader scales by itself and has no `Encoding`; its model takes records as that
loader makes them, and the manifest says so (`encoding` is null).
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import ConfigError, FlmarketError, InvalidInput, MissingDependency, UnknownName, needed
from flmarket.learning import predict as standalone
from flmarket.learning.data import DataSet
from flmarket.learning.data.files import read_csv, read_table
from flmarket.learning.model import (
    LocalTraining,
    Model,
    SoftmaxRegression,
    checked_parameters,
    dimension,
    models,
    with_local,
)
from flmarket.privacy.events import checked_whole

LONGEST_TEXT = 2_000
MOST_PARAMETERS = 100_000_000
MOST_STEPS = 10_000  # or passes over the records, of one owner in one round
_OFFERED = {"features", "classes", "local", "shape", "threads"}


def described(model: Model) -> str:
    """The model as canonical JSON, for `built`; raises InvalidInput for one that the registry did not make."""
    if type(model) is SoftmaxRegression:
        options = {"l2": model.l2, "penalise_biases": model.penalise_biases}
        name, given = "softmax", {key: value for key, value in options.items() if value}
    else:
        origin = getattr(model, "origin", None)
        if origin is None:
            how = 'models.register("name", build) or models.admit("package.module:build"), then models.get'
            raise InvalidInput("model", type(model).__name__, f"one that the registry made ({how})")
        name, given = origin
    local = getattr(model, "local", None)
    about = {
        "name": name,
        "features": getattr(model, "features", given.get("features")),
        "classes": getattr(model, "classes", given.get("classes")),
        "settings": {key: value for key, value in given.items() if key not in _OFFERED},
        "local": None if local is None else asdict(local),
    }
    try:
        text = _canonical(about | ({"shape": given["shape"]} if given.get("shape") else {}))
    except (TypeError, ValueError):
        raise InvalidInput("settings", about["settings"], "finite numbers, texts, and lists of them") from None
    if len(text) > LONGEST_TEXT:
        raise InvalidInput("settings", about["settings"], f"a description of at most {LONGEST_TEXT:,} characters")
    return text


def built(text: str, allow: Collection[str] = ()) -> Model:
    """The model that a text of `described` names, made by this machine's registry.

    A name with a colon would import code: it must be one of `allow`. Anything wrong is an InvalidInput, and found
    before memory is taken for more than a hundred million parameters.
    """
    found = _parsed(text)
    name, features, classes = found["name"], found["features"], found["classes"]
    if not isinstance(name, str) or (":" in name and name not in tuple(allow)):
        raise UnknownName("model", name, "a name that is registered here, or one that this machine's owner allows")
    settings: dict[str, Any] = {
        "features": checked_whole("features", features, 1, MOST_PARAMETERS),
        "classes": checked_whole("classes", classes, 2, MOST_PARAMETERS),
        **_settings(found["settings"]),
    }
    if "shape" in found:
        settings["shape"] = _shape(found["shape"], features)
    if (local := _local(found["local"])) is not None:
        settings["local"] = local
    models.admit(name)
    try:
        with _counted(name):
            models.made(name, **settings)
        model = models.get(name, **settings)
        if local is not None and getattr(model, "local", local) != local:  # a factory that does not ask for it
            model = with_local(model, local)
        again, size = described(model), dimension(model)
    except FlmarketError:
        raise
    except Exception as error:  # of a factory that was given settings by a stranger
        raise InvalidInput(f"settings of model {name}", found["settings"], f"some that it takes ({error!r})") from error
    if size > MOST_PARAMETERS:
        raise InvalidInput("parameters", size, f"at most {MOST_PARAMETERS:,}")
    if again != text:
        raise InvalidInput("model", text, f"what is built here: {again}")
    return model


def _parsed(text: object) -> dict[str, Any]:
    accepted = f"canonical JSON of at most {LONGEST_TEXT:,} characters, as `described` gives it"
    try:
        if not isinstance(text, str) or len(text) > LONGEST_TEXT:
            raise ValueError
        found = json.loads(text)
        if not isinstance(found, dict) or _canonical(found) != text:
            raise ValueError
    except (ValueError, RecursionError):
        raise InvalidInput("model", text, accepted) from None
    wanted = {"name", "features", "classes", "settings", "local"}
    if found.keys() - {"shape"} != wanted:
        raise InvalidInput("model", ", ".join(found), f"the fields {', '.join(sorted(wanted))}, and shape if any")
    return found


def _canonical(values: object) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: object) -> object:
    """NumPy's numbers as Python's; anything else that JSON lacks is refused."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _settings(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() & _OFFERED:
        raise InvalidInput("settings", value, f"settings by name, without {', '.join(sorted(_OFFERED))}")
    return value


def _shape(value: object, features: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= 8:
        raise InvalidInput("shape", value, "a list of one to eight lengths")
    shape = tuple(checked_whole("shape", length, 1, features) for length in value)
    if math.prod(shape) != features:
        raise InvalidInput("shape", value, f"a shape of {features} values")
    return shape


def _local(value: object) -> LocalTraining | None:
    if value is None:
        return None
    known = {field.name for field in fields(LocalTraining)}
    if not isinstance(value, dict) or value.keys() != known:
        raise InvalidInput("local", value, f"{', '.join(sorted(known))}, or null")
    for name in ("steps", "epochs"):
        if value[name] is not None:
            checked_whole(name, value[name], 1, MOST_STEPS)
    return LocalTraining(**value)


def _counted(name: str) -> AbstractContextManager[object]:
    """Ends the building of a network that is too large; what is made without PyTorch is measured when it is made."""
    if models.factory(name) is SoftmaxRegression:
        return nullcontext()
    try:
        from flmarket.learning.torch_model import Counted
    except MissingDependency:
        return nullcontext()
    return Counted(MOST_PARAMETERS)


# --- named arrays -----------------------------------------------------------------------------------------------------


def to_named(model: Model, parameters: ArrayLike) -> dict[str, NDArray[Any]]:
    """The parameters as named arrays in the model's own number type."""
    flat = checked_parameters(parameters, dimension(model), rows=1)[0].astype(getattr(model, "dtype", np.float64))
    ends = np.cumsum([math.prod(shape) for shape in model.tensors.values()])[:-1]
    parts = zip(model.tensors.items(), np.split(flat, ends), strict=True)
    return {name: part.reshape(shape) for (name, shape), part in parts}


def from_named(model: Model, named: Mapping[str, ArrayLike]) -> FloatArray:
    """The flat vector of named arrays; a typed error unless they are exactly the model's own, and finite."""
    if set(named) != set(model.tensors):
        raise InvalidInput("tensors", ", ".join(sorted(named)), f"the names {', '.join(model.tensors)}")
    parts = []
    for name, shape in model.tensors.items():
        try:
            part = np.asarray(named[name], dtype=np.float64)
        except (TypeError, ValueError):
            raise InvalidInput(f"tensor {name}", type(named[name]).__name__, "an array of numbers") from None
        if part.shape != tuple(shape):
            raise InvalidInput(f"tensor {name}", part.shape, f"shape {tuple(shape)}")
        parts.append(part.ravel())
    return np.asarray(checked_parameters(np.concatenate(parts), dimension(model), rows=1)[0])


def save_parameters(
    model: Model, parameters: ArrayLike, path: str | PathLike[str], about: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, with any texts `about` it."""
    Path(path).write_bytes(_saved(model, parameters, about or {}))


def _saved(model: Model, parameters: ArrayLike, about: Mapping[str, str] | None = None) -> bytes:
    with needed("app", "safetensors"):
        from safetensors.numpy import save
    return bytes(save(to_named(model, parameters), None if about is None else dict(about)))


def load_parameters(model: Model, path: str | PathLike[str]) -> FloatArray:
    """What `save_parameters` wrote, or any safetensors file of the same names and shapes."""
    with needed("app", "safetensors"):
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    try:
        return from_named(model, load_file(Path(path)))
    except (OSError, SafetensorError) as error:
        raise ConfigError("model file", str(path), f"a readable safetensors file ({error})") from None


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
        with _typed():
            files = standalone.read_files(place)
            about = standalone.read_about(files)
            for name in (standalone.LAST, standalone.BEST):
                if name in files:
                    standalone.read_tensors(files[name], about["tensors"], name)
            card = standalone.read_json(files[standalone.CARD], standalone.CARD) if standalone.CARD in files else {}
        return cls(files, about, card, tuple(allow))

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(self.about["classes"])

    def weights(self, which: str | None = None) -> dict[str, NDArray[Any]]:
        """Named arrays of a checkpoint, by default of the one to use."""
        with _typed():
            return standalone.weights(self.files, dict(self.about), which)

    def predict(self, records: Mapping[str, NDArray[Any]] | NDArray[Any], which: str | None = None) -> IntArray:
        """The number of each raw record's class; records are columns by name, or an array of numbers."""
        with _typed():
            given = records if isinstance(records, np.ndarray) else dict(records)
            return standalone.predict(self.files, given, which, self.allow)

    def right(self, labels: NDArray[Any], answers: IntArray) -> NDArray[np.bool_]:
        """Which answers are the class that a column of labels says."""
        with _typed():
            return standalone.right(list(self.classes), labels, answers)


def read_raw(path: str | PathLike[str]) -> dict[str, NDArray[Any]] | NDArray[Any]:
    """Raw records: columns of a CSV or Parquet file, or the array of an npz."""
    if str(path).endswith(".parquet"):
        return read_table(Path(path))
    if str(path).endswith(".gz"):
        return read_csv(Path(path), least=1)
    with _typed():
        return standalone.read_records(path)


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


@contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except standalone.Refused as problem:
        raise ConfigError(problem.field, problem.value, problem.accepted) from None
