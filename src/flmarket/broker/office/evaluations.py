"""Buyers' own data: records that their models are tested on, and what data of their own looks like.

An evaluation set is a table of a buyer's with the columns of a data set that the operator offers, and a `label`. It
replaces the test part of that data set in tasks that name it (`broker.evaluation`). With a schema it stands for data
that the operator does not have at all: columns with their units and scaling, and the labels. Such a task names it as
its data too (`data.name`), and is for owners' own machines only, which bring records of that form.

The set's id and SHA-256 are in the task's terms; its records are for nobody but the service that tests with them. What
would break it: a set that changes. None does, and one that a task names cannot be removed.
"""

import csv
import hashlib
import io
import math
import re
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from flmarket.broker.core import Broker, Party, require
from flmarket.broker.errors import Conflict, NotFound
from flmarket.broker.office.operator import note
from flmarket.broker.requests import FLOWER, OWN, EvaluationRequest, TaskRequest, check_visible
from flmarket.broker.stamps import keyed_id, now
from flmarket.broker.tables import EvaluationSet, PartyRow, TaskRow, as_wire, how_many, made_before, vector_bytes
from flmarket.client import wire
from flmarket.errors import InvalidInput
from flmarket.learning import DataSet
from flmarket.learning.data import Encoding

LABEL = "label"
_LEAST, _MOST, _MOST_VALUES = 10, 20_000, 2_000_000
_LARGEST = 1e12  # a feature, scaled: any model's arithmetic stays finite


def add_set(broker: Broker, party: Party, request: EvaluationRequest, *, key: str | None = None) -> wire.EvaluationSet:
    """Records of one's own to test models on, checked and kept; a task names the set as `broker.evaluation`. The same
    `key` keeps the same one once."""
    require(party, "buyer")
    check_visible("name", request.name)
    encoding, classes = _form(broker, request)
    x, y = _records(request.table, encoding, classes)
    slug = re.sub(r"[^a-z0-9]+", "-", request.name.lower()).strip("-")[:20].strip("-") or "set"
    part = keyed_id("e", party.id, key).removeprefix("e_")[:10]
    stored, labels = vector_bytes(x), np.asarray(y, dtype="<i4").tobytes()
    row = EvaluationSet(
        id=f"{OWN if request.schema_ else 'eval-'}{slug}-{part}", party_id=party.id, name=request.name,
        data="" if request.schema_ else request.data, examples=len(y), x=stored, y=labels, created_at=now(),
        schema=None if request.schema_ is None else request.schema_.model_dump(mode="json"),
        sha256=hashlib.sha256(b"\0".join((stored, labels, "\0".join(classes).encode()))).hexdigest(),
    )  # fmt: skip
    with broker.database.write() as session:
        session.get_one(PartyRow, party.id, with_for_update=True)  # she adds her sets one after another
        known = made_before(session, EvaluationSet, row.id, "set", sha256=row.sha256, name=row.name)
        if known is None:
            most = broker.settings.max_evaluations_per_buyer
            if how_many(session, EvaluationSet.party_id == party.id) >= most:
                raise Conflict(f"a buyer has at most {most} sets of her own: remove one")
            session.add(row)
            session.flush()
            note(session, party, "evaluation.add", row.id, detail=f"{row.examples} examples")
    return as_wire(wire.EvaluationSet, known or row)


def list_sets(broker: Broker, party: Party) -> wire.EvaluationPage:
    """One's own evaluation sets, newest first."""
    require(party, "buyer")
    query = select(EvaluationSet).where(EvaluationSet.party_id == party.id).order_by(EvaluationSet.created_at.desc())
    with broker.database.read() as session:
        return wire.EvaluationPage(tuple(as_wire(wire.EvaluationSet, row) for row in session.scalars(query)))


def remove_set(broker: Broker, party: Party, set_id: str) -> None:
    """Forget a set; Conflict if a task was posted with it, whose terms name it."""
    require(party, "buyer")
    with broker.database.write() as session:
        row = session.get(EvaluationSet, set_id, with_for_update=True)  # a task being posted waits, or is counted
        if row is None or row.party_id != party.id:
            raise NotFound("evaluation set", set_id)
        named = TaskRow.spec["broker"]["evaluation"].as_string() == set_id
        if how_many(session, TaskRow.buyer_id == party.id, named):
            raise Conflict("a task was posted with this set: its terms name it")
        session.delete(row)
        note(session, party, "evaluation.remove", set_id)


def check_set(broker: Broker, party: Party, order: TaskRequest) -> None:
    """A typed error unless the order's evaluation set is the buyer's own and fits its data."""
    wanted, data = order.broker.evaluation, order.data.registered
    if not wanted:
        if data.startswith(OWN):
            raise InvalidInput("broker.evaluation", wanted, f"{data}, as in data.name")
        return
    with broker.database.read() as session:
        row = session.get(EvaluationSet, wanted)
    if row is None or row.party_id != party.id:
        raise InvalidInput("broker.evaluation", wanted, "an evaluation set of yours")
    if data != (row.data or row.id):
        raise InvalidInput("broker.evaluation", wanted, f"a set with the columns of {data}")
    if row.schema is not None and order.broker.engine != FLOWER:
        what = "flower for data of your own: only owners' machines hold such records"
        raise InvalidInput("broker.engine", order.broker.engine, what)


def keep_set(session: Session, order: TaskRequest) -> None:
    """Within the writing transaction of a task: its set is still there, and stays."""
    wanted = order.broker.evaluation
    if wanted and session.get(EvaluationSet, wanted, with_for_update={"read": True}) is None:
        raise InvalidInput("broker.evaluation", wanted, "an evaluation set of yours")


def header(broker: Broker, data: str) -> tuple[str, ...]:
    """The columns that a set for a data set has, the label last."""
    encoding, _ = _offered(broker, data)
    return (*encoding.numbers, *encoding.categories, LABEL)


def _form(broker: Broker, request: EvaluationRequest) -> tuple[Encoding, tuple[str, ...]]:
    """How its columns become features, and what its labels are called."""
    if request.schema_ is None:
        return _offered(broker, request.data)
    if request.data:
        raise InvalidInput("data", request.data, "nothing, where the schema says what the columns are")
    return request.schema_.encoding(), tuple(request.schema_.classes)


def _offered(broker: Broker, name: str) -> tuple[Encoding, tuple[str, ...]]:
    data: DataSet = broker.simulations.offered(name)
    return data.encoding or Encoding.even(data.feature_names), data.classes


def _records(text: str, encoding: Encoding, classes: tuple[str, ...]) -> tuple[Any, Any]:
    """Features and classes of a table; a typed error that names line and column."""
    table = _table(text, (*encoding.numbers, *encoding.categories, LABEL))
    rows = len(table[LABEL])
    if rows * len(encoding.features) > _MOST_VALUES:
        raise InvalidInput("table", f"{rows} examples", f"at most {_MOST_VALUES // len(encoding.features):,} examples")
    columns: dict[str, Any] = {name: _numbers(name, table[name]) for name in encoding.numbers}
    for name, known in encoding.categories.items():
        _known(name, table[name], known)
        columns[name] = np.array(table[name])
    _known(LABEL, table[LABEL], classes)
    codes = {name: code for code, name in enumerate(classes)}
    with np.errstate(over="ignore"):
        x = encoding.encode(columns)
    for row, place in np.argwhere(~(np.abs(x) <= _LARGEST))[:1]:
        name, line = encoding.features[place], row + 2
        raise InvalidInput("table", f"line {line}", f"at most {_LARGEST:g} after scaling in column {name}, line {line}")
    return x, np.array([codes[one] for one in table[LABEL]])


def _table(text: str, needs: tuple[str, ...]) -> dict[str, list[str]]:
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        rows = [row for row in reader if row]
    except csv.Error:
        raise InvalidInput("table", f"line {reader.line_num}", "valid CSV") from None
    if missing := [name for name in needs if name not in names]:
        told = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise InvalidInput("table", f"{len(names)} columns", f"a header with the columns {told}")
    if len(set(names)) != len(names):
        raise InvalidInput("table", "a column twice", "a header of different names")
    for line, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise InvalidInput(
                "table", f"line {line}", f"{len(names)} fields in every line; line {line} has {len(row)}"
            )
    if not _LEAST <= len(rows) <= _MOST:
        raise InvalidInput("table", f"{len(rows)} examples", f"{_LEAST} to {_MOST:,} examples; these are {len(rows):,}")
    places = {name: names.index(name) for name in needs}
    return {name: [row[at].strip() for row in rows] for name, at in places.items()}


def _numbers(name: str, column: list[str]) -> Any:
    values = []
    for line, text in enumerate(column, 2):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InvalidInput("table", f"line {line}", f"a number in column {name}, line {line}")
        values.append(value)
    return np.array(values)


def _known(name: str, column: list[str], known: tuple[str, ...]) -> None:
    for line, text in enumerate(column, 2):
        if text not in known:
            shown = ", ".join(known[:12]) + (" …" if len(known) > 12 else "")
            raise InvalidInput("table", f"line {line}", f"one of {shown} in column {name}, line {line}")
