"""What a bought model says of itself: facts for machines, the same in words, and the zip that carries both.

Everything is computed from what the market left behind: the kind with its models, the buyer's test records, the
ledger. Whether a model beats its baseline is the exact sign test (McNemar) on the test records that only one of the two
gets right, at 1 %: a model of which that cannot be said says so. Which checkpoint is best was decided on validation
records; test records measure and decide nothing.

What would break it: a ledger of another run. Totals are what its releases add up to, owner by owner, and the largest of
them is stated, per unit of privacy as the market sells it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flmarket.bids import FloatArray
from flmarket.files import jsonable
from flmarket.learning import DataSet, Model, accuracy
from flmarket.learning.travel import pack
from flmarket.ledger import Award, AwardState, Ledger, format_micros
from flmarket.market import MarketKind
from flmarket.privacy import Event, ExponentialRelease, PrivacyAccount, PureDp, RecordLevel, Uncapped, Unprotected
from flmarket.trust import TrustWords

SIGNIFICANCE = 0.01
MOST_RECEIPTS = 20_000  # in the zip; the ledger has all
DELTA = 1e-5  # of a total that no pure ε bounds, unless the market says another


def model_zip(
    kind: MarketKind,
    data: DataSet,
    ledger: Ledger,
    trust: TrustWords,
    *,
    rounds_played: int,
    names: Mapping[str, str] | None = None,
    statements: Sequence[str] = (),
    documents: Sequence[Mapping[str, Any]] | None = None,
    awards: Sequence[Award] | None = None,
    title: str = "",
) -> bytes:
    """The model of a market as it stands, with everything that belongs to it.

    `names` are the mechanisms', `awards` the task's if they are known already. `documents` are receipts if others than
    the ledger's own are to be shown.
    """
    if awards is None:
        awards = [award for award in ledger.awards() if award.id.startswith(f"{kind.task}/")]
    if kind.tested is not None:
        data = replace(data, x_test=kind.tested.x, y_test=kind.tested.y)
    facts = _facts(kind, data, trust, awards, _privacy(awards, ledger))
    facts |= {"task": title or kind.task, "mechanism": dict(names or {})}
    facts["rounds"] = {"played": rounds_played, "agreed": kind.rounds}
    facts["privacy"]["statements"] = list(statements)
    found = [ledger.receipt(award.id).to_dict() for award in awards[:MOST_RECEIPTS]] if documents is None else documents
    kept = {"head": ledger.head().to_dict(), "receipts": list(found)[:MOST_RECEIPTS]}
    return pack(
        kind.model, data, last=kind.buyers_model, best=kind.best, card=jsonable(facts), text=card_text(facts),
        receipts=jsonable(kept),
    )  # fmt: skip


def _facts(
    kind: MarketKind, data: DataSet, trust: TrustWords, awards: Sequence[Award], privacy: Mapping[str, Any]
) -> dict[str, Any]:
    """The card as plain values, but for what only the caller knows."""
    models = {"last": kind.buyers_model} | ({} if kind.best is None else {"best": kind.best})
    measured = {which: _measured(kind.model, vector, data) for which, vector in models.items()}
    if kind.best is not None:
        measured["best"] |= {
            "round": kind.notes["best_round"] + 1, "validation_accuracy": kind.notes["best_accuracy"],
        }  # fmt: skip
    used = "best" if "best" in measured else "last"
    states = {state.value: sum(award.state is state for award in awards) for state in AwardState}
    posted = [award for award in awards if award.state is AwardState.POSTED]
    return {
        "kind": kind.name,
        "data": {
            "name": data.name, "source": data.source, "licence": data.licence, "records": len(data.y_train),
            "test_records": len(data.y_test),
            "validation_records": 0 if data.validation is None else len(data.validation),
        },
        "model": {"name": getattr(kind.model, "name", type(kind.model).__name__), "parameters": kind.dimension},
        "use": used,
        "accuracy": measured,
        "baseline": {"accuracy": data.baseline_accuracy, "answer": data.classes[_largest(data)]},
        "verdict": measured[used]["verdict"],
        "privacy": {**privacy, "unit": trust.unit, "where": trust.where, "against": trust.against},
        "bill": {
            "spent_micros": sum(award.price_micros for award in posted),
            "owners_paid": len({award.owner for award in posted}), "awards": states,
        },
    }  # fmt: skip


def _measured(model: Model, vector: FloatArray, data: DataSet) -> dict[str, Any]:
    """A checkpoint on the test records, and whether it is better than always answering the largest class."""
    found = {name: float(value) for name, value in model.evaluate(vector, data.test).items()}
    answers, constant = getattr(model, "predict", None), data.y_test == _largest(data)
    better = found["accuracy"] > data.baseline_accuracy
    if answers is not None:
        from scipy.stats import binomtest  # half a second to import

        right = np.asarray(answers(vector, data.x_test)) == data.y_test
        assert abs(accuracy(right, np.ones_like(right)) - found["accuracy"]) < 1e-6
        only, missed = int((right & ~constant).sum()), int((constant & ~right).sum())
        better = only > missed and binomtest(only, only + missed).pvalue < SIGNIFICANCE
    said = (
        "better than its baseline on the test records"
        if better
        else "NOT shown to be better than its baseline: always answering the largest class does as well"
    )
    return {**found, "better_than_baseline": bool(better), "verdict": said}


def _largest(data: DataSet) -> int:
    return int(np.bincount(data.y_train).argmax())


def _privacy(awards: Sequence[Award], ledger: Ledger) -> dict[str, Any]:
    """The largest loss of one release, and the largest that any owner's releases add up to."""
    owners = {award.id: award.owner for award in awards}
    given: dict[str, list[Event]] = {}
    for release in (one for owner in set(owners.values()) for one in ledger.releases(owner)):
        if release.award_id in owners:
            given.setdefault(owners[release.award_id], []).append(release.guarantee)
    for award in awards:  # an update that nothing protects is no release on record
        if award.state is AwardState.POSTED and isinstance(award.loss, Unprotected):
            given.setdefault(award.owner, []).append(award.loss)
    if any(isinstance(event, RecordLevel) for some in given.values() for event in some):  # one unit in one market
        given = {owner: [_inner(event) for event in some] for owner, some in given.items()}
    events = [event for some in given.values() for event in some]
    if not events:
        return {"releases": 0, "release_max": "nothing was released", "total_max": "nothing was released"}
    pure = all(isinstance(event, PureDp | ExponentialRelease) for event in events)
    once = max(_epsilon([event], pure=pure) for event in events)
    total = max(_epsilon(some, pure=pure) for some in given.values())
    return {
        "releases": len(events),
        "epsilon_per_release_max": once, "epsilon_total_max": total, "delta": 0.0 if pure else DELTA,
        "release_max": _said(once, pure=pure), "total_max": _said(total, pure=pure),
    }  # fmt: skip


def _inner(event: Event) -> Event:
    return event.loss if isinstance(event, RecordLevel) else event


def _epsilon(events: Sequence[Event], *, pure: bool) -> float:
    if pure:
        return sum(event.epsilon for event in events if isinstance(event, PureDp | ExponentialRelease))
    account = PrivacyAccount(Uncapped(DELTA))
    for event in events:
        account.compose(event)
    return account.spent


def _said(epsilon: float, *, pure: bool) -> str:
    if np.isinf(epsilon):
        return "no protection: what was released has no bound"
    return f"ε = {epsilon:.4g}" if pure else f"(ε, δ) = ({epsilon:.4g}, {DELTA:g})"


def card_text(facts: Mapping[str, Any]) -> str:
    """The card in words, as Markdown."""

    def get(*path: str, default: Any = "not stated") -> Any:
        value: Any = facts
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return default if value in (None, "", [], {}) else value

    use = get("use", default="last")
    lines = [f"# {get('task')}", "", f"**{str(get('verdict')).capitalize()}.**", ""]
    for which in ("best", "last"):
        one = get("accuracy", which, default=None)
        if isinstance(one, Mapping):
            chosen = ", the one to use" if which == use else ""
            by = ""
            if "round" in one:
                by = f"; of round {one['round']}, {_share(one.get('validation_accuracy'))} on validation records"
            lines.append(f"- {which} model{chosen}: accuracy {_share(one.get('accuracy'))} on test records{by}")
    lines += [
        f"- baseline, always {get('baseline', 'answer')}: {_share(get('baseline', 'accuracy'))}",
        f"- data: {get('data', 'name')}, {get('data', 'records')} records at owners, {get('data', 'test_records')} to "
        f"test, {get('data', 'validation_records', default=0)} to choose; source: {get('data', 'source')}; "
        f"licence: {get('data', 'licence')}",
        f"- market: {get('kind')}, {get('rounds', 'played')} of {get('rounds', 'agreed')} rounds; "
        + ", ".join(f"{key} {value}" for key, value in get("mechanism", default={}).items()),
        f"- model: {get('model', 'name')}, {get('model', 'parameters')} parameters",
        "",
        "## Privacy",
        "",
        f"- one release: at most {get('privacy', 'release_max')}",
        f"- one owner, total over all her releases: at most {get('privacy', 'total_max')}",
        f"- {get('privacy', 'unit')}",
        f"- {get('privacy', 'where')} {get('privacy', 'against', default='')}",
        *(f"- {one}" for one in get("privacy", "statements", default=[])),
        "",
        "## Bill",
        "",
        f"{format_micros(int(get('bill', 'spent_micros', default=0)))} paid to "
        f"{get('bill', 'owners_paid', default=0)} owners; "
        + ", ".join(f"{count} awards {state}" for state, count in get("bill", "awards", default={}).items())
        + ". The ledger's receipts are in receipts.json.",
        "",
        "## Use",
        "",
        "`python predict.py records.csv` answers with classes for raw records, columns as in the data above; "
        "`flmarket model predict` does so for every kind of model.",
        "",
    ]  # fmt: skip
    return "\n".join("".join(c for c in line if c.isprintable()) for line in lines)


def _share(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "not stated"
