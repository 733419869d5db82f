"""`flmarket model`: what a bought model says of itself, its answers to raw records, and its parts as files."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flmarket.cli.output import errors, print_json, print_path, screen
from flmarket.errors import ConfigError, InvalidInput, MissingDependency
from flmarket.files import write_file, write_files

model = typer.Typer(help="Use what was bought: its card, its answers, its files.", no_args_is_help=True)
Model = Annotated[Path, typer.Argument(help="A model.zip, its unpacked folder, or the folder of a run.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Which = Annotated[str | None, typer.Option(help="last or best; default the one that the card names.")]


@model.command(epilog="Example: `flmarket model card out/run`.")
def card(place: Model, json: Json = False) -> None:
    """Task, mechanism, privacy, accuracy beside the baseline, bill."""
    from flmarket.learning.travel import Bundle
    from flmarket.report.model_card import card_text

    found = Bundle.read(place)
    if json:
        print_json(found.card)
    else:
        screen.print(card_text(found.card), markup=False, highlight=False)


@model.command(epilog="Example: `flmarket model predict out/run test.csv --label y --out answers.csv`.")
def predict(
    place: Model,
    records: Annotated[Path, typer.Argument(help="Raw records: CSV, Parquet, or an npz with x.")],
    label: Annotated[str | None, typer.Option(help="A column with the true classes; y of an npz.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the classes here instead of to the screen.")] = None,
    checkpoint: Which = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="A package.module:build that the model may be built by; repeat.")
    ] = None,
    json: Json = False,
) -> None:
    """The class of each record, by the scaling and encoding that came with the model."""
    from flmarket.learning.travel import Bundle, read_raw

    found, raw = Bundle.read(place, allow=allow or ()), read_raw(records)
    truth = None if label is None else _labels(records, raw, label)
    answers = found.predict(raw, checkpoint)
    named = [found.classes[k] for k in answers.tolist()]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([["class"], *([one] for one in named)])
    if out is not None:
        write_file(out, text.getvalue())
    elif not json:
        sys.stdout.write(text.getvalue())
    facts: dict[str, Any] = {"records": len(named), "checkpoint": checkpoint or found.about["use"]}
    if truth is not None:
        facts["accuracy"] = float(np.mean(found.right(truth, answers)))
        if not json:
            errors.print(f"accuracy {facts['accuracy']:.4f} on {len(named)} records")
    if json:
        print_json(facts | ({"out": str(out)} if out is not None else {"classes": named}))


def _labels(path: Path, raw: Any, label: str) -> Any:
    if isinstance(raw, dict):
        if label not in raw:
            raise InvalidInput("--label", label, f"a column of the records: {', '.join(raw)}")
        return raw[label]
    with np.load(path, allow_pickle=False) as stored:
        if label not in stored:
            raise InvalidInput("--label", label, f"an array of the records: {', '.join(stored.files)}")
        return np.asarray(stored[label])


@model.command(epilog="Examples: `flmarket model export out/run --out bought/`; `… --out weights.npz`.")
def export(
    place: Model,
    out: Annotated[Path, typer.Option(help="A folder for all files; or one .safetensors or .npz for the weights.")],
    checkpoint: Which = None,
) -> None:
    """The files of a model, checked first: weights, scaling, card, receipts and predict.py."""
    from flmarket.learning import predict as standalone
    from flmarket.learning.travel import Bundle

    found = Bundle.read(place)
    if out.suffix == ".npz":
        with io.BytesIO() as buffer:
            np.savez(buffer, allow_pickle=False, **found.weights(checkpoint))
            write_file(out, buffer.getvalue())
    elif out.suffix == ".safetensors":
        try:
            from safetensors.numpy import save
        except ImportError:
            raise MissingDependency("safetensors", "app") from None
        write_file(out, save({name: np.ascontiguousarray(part) for name, part in found.weights(checkpoint).items()}))
    elif out.exists() and not out.is_dir():
        raise ConfigError("--out", str(out), "a folder, or a file that ends in .safetensors or .npz")
    else:
        # the script is this installation's own: what a stranger's zip calls predict.py is not for running
        own = Path(standalone.__file__).read_bytes()
        write_files(out, {**found.files, standalone.SCRIPT: own})
    print_path("model", out)
