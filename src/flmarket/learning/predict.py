"""Apply a model that was bought: raw records in, classes out. For softmax regression NumPy is all that this needs.

    python predict.py records.csv > answers.csv               # beside model.json, in the unpacked folder
    python predict.py --model model.zip --label y test.csv    # and how many are right, if a column has the classes

A file of its own that travels inside every model (`flmarket.learning.travel`) and is what `flmarket model predict`
runs, so both answer alike. Records are CSV files with the columns of the data that the model learned from, in any
order, or an npz with `x`; scaling and encoding are the model's. Other models than softmax regression need flmarket and
PyTorch.

Models come from strangers. Nothing here is unpickled, imported or run: files have fixed names and limits, JSON is data,
weights are numbers of the announced shapes, and whatever does not fit is refused before memory is taken for it. What
would break it: columns of the same name that mean something else, such as another unit; that cannot be seen from here.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

FORMAT, VERSION = "flmarket-model", 1
ABOUT, CARD, TEXT, LAST, BEST, SCRIPT, RECEIPTS = (
    *("model.json", "card.json", "MODEL_CARD.md", "weights.safetensors", "best.safetensors", "predict.py"),
    "receipts.json",
)
# The files of a model, and the most bytes of each.
LIMITS = {
    ABOUT: 64 << 20, CARD: 1 << 20, TEXT: 1 << 20, LAST: 1 << 30, BEST: 1 << 30, SCRIPT: 1 << 20, RECEIPTS: 256 << 20,
}  # fmt: skip
MOST_FEATURES, MOST_CLASSES, MOST_RECORDS_BYTES = 1_000_000, 100_000, 1 << 30
_TYPES: dict[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_HEADER = 1 << 20
_DEPTH = 16
LARGEST, ABOVE_ZERO = "largest score", "score above 0"
Columns = dict[str, NDArray[Any]]


class Refused(ValueError):
    """A model or records that are not accepted: what, what it was, and what would be."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field, self.value, self.accepted = field, value, accepted
        super().__init__(f"{field}: {str(value)[:80]} is not accepted; expected {accepted}")


# --- files ------------------------------------------------------------------------------------------------------------


def read_files(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The files of a model in a zip or a folder, by name."""
    try:
        if os.path.isdir(path):
            return _from_folder(path)
        with open(path, "rb") as file:
            return _from_zip(file)
    except OSError as error:
        raise Refused("model", path, f"a readable zip or folder ({error.strerror or error})") from None


def _from_folder(path: str | os.PathLike[str]) -> dict[str, bytes]:
    found = {}
    for name in LIMITS:
        place = os.path.join(path, name)
        if os.path.isfile(place):
            with open(place, "rb") as file:
                found[name] = _limited(file, name)
    return found


def _from_zip(file: IO[bytes]) -> dict[str, bytes]:
    """Fixed names only, each once, none larger than its limit whatever the archive says of it."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len(entries) > len(LIMITS):
                raise Refused("model", f"{len(entries)} files", f"at most {len(LIMITS)}")
            found: dict[str, bytes] = {}
            for entry in entries:
                if entry.filename not in LIMITS or entry.filename in found or entry.flag_bits & 0x1:
                    raise Refused("model", entry.filename, f"the files {', '.join(LIMITS)}, once each")
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise Refused("model", entry.filename, "files that are stored or deflated")
                if entry.file_size > LIMITS[entry.filename]:
                    raise Refused(entry.filename, f"{entry.file_size} bytes", f"at most {LIMITS[entry.filename]}")
                with archive.open(entry) as stream:
                    found[entry.filename] = _limited(stream, entry.filename)
            return found
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused("model", str(error), "a zip file that is whole") from None


def _limited(stream: IO[bytes], name: str) -> bytes:
    content = stream.read(LIMITS[name] + 1)
    if len(content) > LIMITS[name]:
        raise Refused(name, f"more than {LIMITS[name]} bytes", f"at most {LIMITS[name]}")
    return content


def read_json(content: bytes, name: str) -> dict[str, Any]:
    """An object, without numbers that JSON does not have, and not nested without end."""
    try:
        found = json.loads(content.decode("utf-8"), parse_constant=_no_number)
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise Refused(name, str(error) or type(error).__name__, "a JSON object") from None
    if not isinstance(found, dict) or _deeper(found, _DEPTH):
        raise Refused(name, type(found).__name__, f"a JSON object, at most {_DEPTH} levels deep")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _deeper(value: object, levels: int) -> bool:
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return levels < 0 or any(_deeper(part, levels - 1) for part in parts)


def read_about(files: Mapping[str, bytes]) -> dict[str, Any]:
    """model.json, checked: what the model is, its features and classes, and how raw columns become features."""
    if ABOUT not in files or LAST not in files:
        raise Refused("model", ", ".join(files) or "nothing", f"{ABOUT} and {LAST} at least")
    about = read_json(files[ABOUT], ABOUT)
    if (about.get("format"), about.get("version")) != (FORMAT, VERSION):
        raise Refused(ABOUT, (about.get("format"), about.get("version")), f"{FORMAT}, version {VERSION}")
    features, classes = _names(about, "features", 1, MOST_FEATURES), _names(about, "classes", 2, MOST_CLASSES)
    shapes = about.get("tensors")
    if not isinstance(shapes, dict) or not shapes or not all(map(_is_shape, shapes.values())):
        raise Refused(f"{ABOUT}: tensors", shapes, "names with shapes")
    if about.get("rule") not in (LARGEST, ABOVE_ZERO):
        raise Refused(f"{ABOUT}: rule", about.get("rule"), f"{LARGEST!r} or {ABOVE_ZERO!r}")
    if about.get("use") not in ("last", "best") or (about["use"] == "best" and BEST not in files):
        raise Refused(f"{ABOUT}: use", about.get("use"), "last, or best where there is one")
    model = about.get("model")
    named = isinstance(model, dict) and isinstance(model.get("name"), str)
    if not (named or model is None) or not isinstance(about.get("shape"), list):
        raise Refused(f"{ABOUT}: model, shape", model, "an object with a name, or null, and a list")
    encoding = about.get("encoding")
    if encoding is not None:
        _check_encoding(encoding, features)
    if about["model"] is not None and about["model"]["name"] == "softmax":
        outputs = 1 if len(classes) == 2 else len(classes)
        wanted = {"weights": [outputs, len(features)], "biases": [outputs]}
        rule = ABOVE_ZERO if outputs == 1 else LARGEST
        if shapes != wanted or about["rule"] != rule:
            raise Refused(f"{ABOUT}: tensors, rule", (shapes, about["rule"]), f"{wanted} and {rule!r}, by its classes")
    return about


def _names(about: dict[str, Any], field: str, least: int, most: int) -> list[str]:
    found = about.get(field)
    if not isinstance(found, list) or not least <= len(found) <= most or not all(isinstance(x, str) for x in found):
        raise Refused(f"{ABOUT}: {field}", found, f"{least} to {most} names")
    return found


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(type(k) is int and 0 < k <= 1 << 31 for k in value)


def _check_encoding(encoding: object, features: list[str]) -> None:
    accepted = "numbers with an offset and a scale each, and categories, that make the features"
    if not isinstance(encoding, dict) or type(encoding.get("clipped")) is not bool:
        raise Refused(f"{ABOUT}: encoding", encoding, accepted)
    numbers, categories = encoding.get("numbers"), encoding.get("categories")
    if not isinstance(numbers, list) or not isinstance(categories, dict):
        raise Refused(f"{ABOUT}: encoding", encoding, accepted)
    for field in ("offset", "scale"):
        values = encoding.get(field)
        if not isinstance(values, list) or len(values) != len(numbers):
            raise Refused(f"{ABOUT}: encoding.{field}", values, f"{len(numbers)} numbers")
        for value in values:
            known = type(value) in (int, float) and abs(value) <= sys.float_info.max
            if not known or (field == "scale" and value == 0):
                raise Refused(f"{ABOUT}: encoding.{field}", value, "finite numbers, scales other than 0")
    lists = [numbers, *categories.values()]
    if not all(isinstance(known, list) and all(isinstance(one, str) for one in known) for known in lists):
        raise Refused(f"{ABOUT}: encoding", encoding, accepted)
    made = [*numbers, *(f"{name}={value}" for name, known in categories.items() for value in known)]
    if made != features or any(list(known) != sorted(known) or not known for known in categories.values()):
        raise Refused(f"{ABOUT}: encoding", f"{len(made)} features", "the model's own features, categories in order")


def read_tensors(content: bytes, shapes: dict[str, list[int]], name: str = LAST) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file (a length, a JSON header, numbers): exactly these names and shapes, finite."""
    if len(content) < 8:
        raise Refused(name, f"{len(content)} bytes", "a safetensors file")
    length = int.from_bytes(content[:8], "little")
    if length > min(_HEADER, len(content) - 8):
        raise Refused(name, f"a header of {length} bytes", "one that the file has")
    header = read_json(content[8 : 8 + length], name)
    entries = {key: value for key, value in header.items() if key != "__metadata__"}
    if entries.keys() != shapes.keys():
        raise Refused(name, ", ".join(sorted(entries)), f"the tensors {', '.join(shapes)}")
    body, found, at = memoryview(content)[8 + length :], {}, 0
    for key in entries:
        if not _is_entry(entries[key]) or entries[key]["shape"] != list(shapes[key]):
            raise Refused(f"{name}: {key}", entries[key], f"numbers of shape {shapes[key]}")
    for key in sorted(entries, key=lambda one: int(entries[one]["data_offsets"][0])):
        kind, (start, stop) = _TYPES[entries[key]["dtype"]], entries[key]["data_offsets"]
        if start != at or stop - start != kind.itemsize * math.prod(shapes[key]) or stop > len(body):
            raise Refused(f"{name}: {key}", (start, stop), "as many bytes as its shape has, one tensor after the other")
        found[key], at = np.frombuffer(body[start:stop], dtype=kind).reshape(shapes[key]), stop
        if not np.isfinite(found[key]).all():
            raise Refused(f"{name}: {key}", "NaN or infinity", "finite numbers")
    if at != len(body):
        raise Refused(name, f"{len(body) - at} bytes more", "nothing after the last tensor")
    return {key: found[key] for key in shapes}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list) or str(entry.get("dtype")) not in _TYPES:
        return False
    span = entry.get("data_offsets")
    return isinstance(span, list) and len(span) == 2 and all(type(k) is int and k >= 0 for k in span)


# --- records ----------------------------------------------------------------------------------------------------------


def read_records(path: str | os.PathLike[str]) -> Columns | NDArray[Any]:
    """Columns of text by name from a CSV file (`,`, `;` or tabs), or the array `x` of an npz."""
    try:
        if os.path.getsize(path) > MOST_RECORDS_BYTES:
            raise Refused("records", path, f"at most {MOST_RECORDS_BYTES} bytes")
        if str(path).endswith(".npz"):
            with np.load(path, allow_pickle=False) as stored:
                return np.asarray(stored["x"] if "x" in stored else stored["x_test"])
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except Refused:
        raise
    except (OSError, UnicodeDecodeError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Refused("records", path, f"a CSV file in UTF-8, or an npz with x ({error})") from None
    return columns(text)


def columns(text: str, delimiter: str = "", needs: Sequence[str] = (), least: int = 1) -> Columns:
    """The fields of CSV as text, by a header with the names that are needed; separated by what the header has most."""
    by = delimiter or max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=by, strict=True)
    try:
        header = next(reader, [])
        rows = [row for row in reader if row]
    except csv.Error as error:
        raise Refused("records", f"line {reader.line_num}", f"valid CSV ({error})") from None
    if missing := [name for name in needs if name not in header]:
        raise Refused("records", header, f"a {by!r}-separated header with {', '.join(missing)}")
    if not header or len(set(header)) != len(header):
        raise Refused("records", header, "a header of different column names")
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise Refused("records", f"line {line} with {len(row)} fields", f"{len(header)} fields")
    if len(rows) < least:
        raise Refused("records", f"{len(rows)} records", f"at least {least}")
    return dict(zip(header, (np.array(column) for column in zip(*rows, strict=True)), strict=True))


def encode(about: dict[str, Any], records: Columns | NDArray[Any]) -> NDArray[np.float64]:
    """Raw records as the features that the model learned from, (records, features)."""
    encoding = about["encoding"]
    names = about["features"] if encoding is None else encoding["numbers"]
    categories: dict[str, list[str]] = {} if encoding is None else encoding["categories"]
    if isinstance(records, np.ndarray):
        raw = _from_array(records, names, categories)
    else:
        if missing := [name for name in (*names, *categories) if name not in records]:
            raise Refused("records", ", ".join(records), f"a column {missing[0]}, as the model's data had")
        raw = np.empty((len(next(iter(records.values()))), len(names)))
        for place, name in enumerate(names):
            raw[:, place] = _numbers(records[name], name)
    if not np.isfinite(raw).all():
        raise Refused("records", "a value that is missing or no number", "finite numbers")
    if encoding is None:
        return raw
    scaled = (raw - np.array(encoding["offset"], dtype=np.float64)) / np.array(encoding["scale"], dtype=np.float64)
    if encoding["clipped"]:
        np.clip(scaled, 0.0, 1.0, out=scaled)
    hot = [one_hot(texts(records[name]), known) for name, known in categories.items()]
    return np.concatenate([scaled, *hot], axis=1)


def _from_array(records: NDArray[Any], names: list[str], categories: dict[str, list[str]]) -> NDArray[np.float64]:
    size = math.prod(records.shape[1:])
    if categories or records.ndim < 2 or size != len(names) or not np.issubdtype(records.dtype, np.number):
        what = "a table with its columns by name" if categories else f"records of {len(names)} numbers"
        raise Refused("records", f"{records.dtype} {records.shape}", what)
    return np.ascontiguousarray(records.reshape(len(records), -1), dtype=np.float64)


def _numbers(values: NDArray[Any], name: str) -> NDArray[np.float64]:
    try:
        return np.where(values == "", "nan", values).astype(np.float64) if values.dtype.kind == "U" else values * 1.0
    except (ValueError, TypeError) as error:
        raise Refused(f"records: {name}", str(error), "numbers") from None


def one_hot(values: NDArray[Any], known: Sequence[str]) -> NDArray[np.float64]:
    """A column for each of the sorted categories; a value that is none of them has zeros."""
    categories = np.array(known)
    codes = np.minimum(np.searchsorted(categories, values), len(categories) - 1)
    encoded = np.zeros((len(values), len(categories)))
    encoded[np.arange(len(values)), codes] = categories[codes] == values
    return encoded


def texts(values: NDArray[Any]) -> NDArray[np.str_]:
    """A column as texts: 1.0 is 1."""
    known = (str(int(x)) if isinstance(x, float) and x.is_integer() else str(x) for x in values.tolist())
    return np.array(list(known), dtype=np.str_)


# --- the model --------------------------------------------------------------------------------------------------------


def softmax_scores(named: dict[str, NDArray[Any]], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear scores (records, outputs)."""
    weights, biases = (named[name].astype(np.float64) for name in ("weights", "biases"))
    return np.asarray(x @ np.swapaxes(weights, -1, -2) + biases[None, :])


def decide(rule: str, scores: NDArray[Any]) -> NDArray[np.int64]:
    """The number of each record's class; a tie goes to the lower one."""
    if rule == ABOVE_ZERO:
        return np.asarray(scores[:, 0] > 0, dtype=np.int64)
    return np.asarray(np.argmax(scores, axis=-1), dtype=np.int64)


def weights(files: Mapping[str, bytes], about: dict[str, Any], which: str | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of a checkpoint, by default of the one that the model says to use."""
    chosen = about["use"] if which is None else which
    name = {"last": LAST, "best": BEST}.get(chosen, "")
    if name not in files:
        raise Refused("checkpoint", chosen, "last, or best where there is one")
    return read_tensors(files[name], about["tensors"], name)


def predict(
    files: Mapping[str, bytes], records: Columns | NDArray[Any], which: str | None = None, allow: tuple[str, ...] = ()
) -> NDArray[np.int64]:
    """The number of each record's class; a model other than softmax regression is built by flmarket, if it may."""
    about = read_about(files)
    named, x = weights(files, about, which), encode(about, records)
    if about["model"] is not None and about["model"]["name"] == "softmax":
        return decide(about["rule"], softmax_scores(named, x))
    try:
        from flmarket.learning.travel import network_classes
    except ImportError:
        raise Refused("model", about["model"], "softmax regression here; `flmarket model predict` for others") from None
    return np.asarray(network_classes(about, named, x, allow), dtype=np.int64)


def right(classes: list[str], labels: NDArray[Any], answers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which answers are the class that a column says, by name, or by number where no name is one of the classes."""
    try:
        said = texts(np.asarray(labels).astype(np.float64)).tolist()
    except ValueError:
        said = [str(value) for value in labels.tolist()]
    if said and not set(said) & set(classes):
        numbers = {str(k): name for k, name in enumerate(classes)}
        if not set(said) <= numbers.keys():
            raise Refused("label", ", ".join(sorted(set(said))[:5]), f"the classes {', '.join(classes[:20])}")
        said = [numbers[text] for text in said]
    return np.array([classes[k] == text for k, text in zip(answers.tolist(), said, strict=True)])


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Classes of raw records, by a model bought with flmarket.")
    parser.add_argument("records", help="a CSV file with the columns of the model's data, or an npz with x")
    parser.add_argument("--model", default=os.path.dirname(os.path.abspath(__file__)), help="a zip or a folder")
    parser.add_argument("--label", help="a column with the true classes: say how many are right")
    parser.add_argument("--checkpoint", choices=("last", "best"), help="default: the one that the model says")
    given = parser.parse_args(arguments)
    try:
        files, records = read_files(given.model), read_records(given.records)
        answers, classes = predict(files, records, given.checkpoint), read_about(files)["classes"]
        good = None
        if given.label is not None:
            if isinstance(records, np.ndarray) or given.label not in records:
                raise Refused("--label", given.label, "a column of the records")
            good = right(classes, records[given.label], answers)
    except Refused as problem:
        print(problem, file=sys.stderr)
        return 2
    print("class")
    for answer in answers.tolist():
        print(classes[answer])
    if good is not None:
        print(f"{good.sum()} of {len(good)} right: {good.mean()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
