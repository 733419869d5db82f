"""Bank Marketing: 41,188 phone calls of a Portuguese bank; did the client subscribe a term deposit?

Moro, Cortez, Rita, A Data-Driven Approach to Predict the Success of Bank Telemarketing, Decision Support
Systems 62, 2014; UCI data set 222, bank-additional-full.csv. `duration` is dropped: a call's length is known
only when its outcome is. 9 numbers are standardised, 10 categories become 53 columns: 62 features. The file's
categories are taken as the schema, since "default = yes" occurs three times only and a split could lose it.

The file is in date order (2008 to 2010, through the financial crisis), so records are shuffled with a fixed
seed before the stratified 80/20 split. What that breaks: the task is then to fill in, not to forecast, and is
easier.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import ConfigError
from flmarket.learning.data.base import DataSet, one_hot, standardised, stratified_split
from flmarket.learning.data.files import Locator, RemoteFile, Source, read_bytes

__all__ = ["SOURCE", "load"]

NUMERIC = (
    "age",
    "campaign",
    "pdays",
    "previous",
    "emp.var.rate",
    "cons.price.idx",
    "cons.conf.idx",
    "euribor3m",
    "nr.employed",
)
CATEGORICAL = (
    "job",
    "marital",
    "education",
    "default",
    "housing",
    "loan",
    "contact",
    "month",
    "day_of_week",
    "poutcome",
)
SPLIT_SEED = 20_221
TEST_SHARE = 0.2
SOURCE = Source(
    "bank-marketing",
    (
        RemoteFile(
            "bank-additional-full.csv",
            "74adfc578bf77a7ff4bb1ba4a9f8709d9e3c6907342959c2c8416847e0afb4d8",
            "https://archive.ics.uci.edu/static/public/222/bank+marketing.zip",
            unpack=("bank-additional.zip", "bank-additional-full.csv"),
        ),
    ),
)


def load(locator: Locator) -> DataSet:
    """Read, encode, shuffle and split."""
    path = locator.locate(SOURCE)["bank-additional-full.csv"]
    columns = _columns(path)
    answers = columns["y"]
    if not np.isin(answers, ("no", "yes")).all():
        raise ConfigError(f"{path}, y", answers[~np.isin(answers, ("no", "yes"))][0], "yes or no")
    y = (answers == "yes").astype(np.int64)
    if not 1 < y.sum() < len(y) - 1:
        raise ConfigError(f"{path}, y", f"{y.sum()} yes of {len(y)}", "two or more of each answer")
    try:
        numbers = np.stack([columns[name].astype(np.float64) for name in NUMERIC], axis=1)
    except ValueError as error:
        raise ConfigError(str(path), str(error), f"numbers in {', '.join(NUMERIC)}") from None
    encoded = np.concatenate([one_hot(columns[n], np.unique(columns[n])) for n in CATEGORICAL], axis=1)
    train, test = stratified_split(y, test_share=TEST_SHARE, seed=SPLIT_SEED)
    numbers_train, numbers_test = standardised(numbers[train], numbers[test])
    return DataSet(
        "bank-marketing",
        np.concatenate([numbers_train, encoded[train]], axis=1),
        y[train],
        np.concatenate([numbers_test, encoded[test]], axis=1),
        y[test],
        classes=("no", "yes"),
        source="Moro, Cortez, Rita 2014, UCI data set 222, doi:10.24432/C5K306",
        licence="CC BY 4.0",
    )


def _columns(path: Path) -> dict[str, NDArray[np.str_]]:
    text = read_bytes(path).decode("utf-8", errors="replace")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=";", strict=True)
    try:
        header = next(reader, [])
        missing = [name for name in (*NUMERIC, *CATEGORICAL, "y") if name not in header]
        if missing:
            raise ConfigError(str(path), header, f"a ';'-separated header with {', '.join(missing)}")
        rows = list(reader)
    except csv.Error as error:
        raise ConfigError(str(path), f"line {reader.line_num}", f"valid CSV ({error})") from None
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ConfigError(str(path), f"line {line} with {len(row)} fields", f"{len(header)} fields")
    if len(rows) < 10:
        raise ConfigError(str(path), f"{len(rows)} records", "at least 10")
    return dict(zip(header, (np.array(column) for column in zip(*rows, strict=True)), strict=True))
