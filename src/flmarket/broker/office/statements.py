"""What an owner sold, earned and gave up: the statement, as values or as CSV, and her lifetime cap; and her privacy in
plain words, always from the total of everything she gave up (`flmarket.trust`)."""

import math
from typing import Any

from sqlalchemy import ColumnElement, Integer, Select, and_, bindparam, case, func, select, true

from flmarket.broker.core import Broker, Party, require
from flmarket.broker.errors import Conflict
from flmarket.broker.office.operator import note
from flmarket.broker.office.pseudonyms import BY_PARTY, WINDOW, reputation
from flmarket.broker.requests import without_invisible
from flmarket.broker.tables import DisputeRow, PartyRow, Release, TaskRow, as_wire
from flmarket.client import wire
from flmarket.errors import InvalidInput, PrivacyBudgetExhausted
from flmarket.files import csv_text
from flmarket.ledger import AwardState, format_micros
from flmarket.ledger.entry import PICO, RESOLUTIONS, EntryKind, limit_of
from flmarket.ledger.store import entries
from flmarket.privacy import ApproxDp, Cap, PureDp, RecordLevel, Unit, unit_of
from flmarket.trust import certainty, meaning_of, task_words

_MOST = 100_000
_LATEST = 50
DEFAULT_DELTA = 1e-5  # of a cap for records
_HEADER = (
    "When", "Task", "Records and noise", "Round", "ε this round", "ε total after", "Records", "Awarded", "Paid",
    "State", "Reason", "Task id", "Award",
)  # fmt: skip
# how pages and papers call what has become of an award
AWARD_WORDS = {"posted": "paid", "voided": "not delivered", "expired": "too late", "pending": "in escrow"}


def privacy(broker: Broker, party: Party) -> wire.Privacy:
    """Total ε spent and left over all tasks, as the ledger counts it."""
    require(party, "owner")
    account = broker.books.ledger.privacy_accounts([party.id]).get(party.id)
    cap, spent = (0.0, 0.0) if account is None else (limit_of(account.cap), account.spent)
    unit, delta = _unit(None if account is None else account.cap)
    left = max(0.0, cap - spent)
    meaning = meaning_of(cap, delta)
    if cap <= 0:
        words = "You have no cap yet: set one before you bid."
    elif left:
        words = (
            f"All your releases together cost at most ε = {spent:.4g} in total; {left:.3g} of {cap:.4g} "
            f"({100 * left / cap:.0f} %) is left under your cap. {meaning}"
        )
    else:
        sold = f"You have sold all the privacy that you were willing to sell, ε = {cap:.4g} in total: no more is sold."
        words = f"{sold} {meaning}"
    return wire.Privacy(cap, spent, left, words, unit, delta)


def set_cap(
    broker: Broker, party: Party, cap_epsilon_total: float, *, unit: Unit | None = None, delta: float | None = None
) -> wire.Privacy:
    """Change one's own cap; never below what was released already, and never to another unit than was released.

    Without a unit or a δ hers stay.
    """
    require(party, "owner")
    now_unit, now_delta = _unit(broker.books.ledger.cap(party.id))
    wanted: Cap = PureDp(cap_epsilon_total)
    if (unit or now_unit) == "record":
        wanted = RecordLevel(ApproxDp(cap_epsilon_total, delta or now_delta or DEFAULT_DELTA))
    elif delta is not None:
        raise InvalidInput("delta", delta, "none: a cap for whole updates is in ε alone; unit = 'record' has a δ")
    try:
        broker.books.ledger.register_cap(party.id, wanted)
    except PrivacyBudgetExhausted:
        spent = broker.books.privacy(party.id)[1]
        raise Conflict(f"you have given up ε = {spent:.6g} in total already; a cap below that is not kept") from None
    except InvalidInput:
        sold = f"you have sold privacy of the {now_unit} already, and no sum of both units means anything"
        raise Conflict(f"{sold}: sell the other as a party of its own") from None
    said = f"{cap_epsilon_total:g}" if isinstance(wanted, PureDp) else str(wanted)
    with broker.database.write() as session:
        note(session, party, "cap.set", party.id, detail=said)
    return privacy(broker, party)


def _unit(cap: Cap | None) -> tuple[Unit, float]:
    """For what a cap is, and at which δ; 0 without one."""
    inner = cap.loss if isinstance(cap, RecordLevel) else cap
    return "update" if cap is None else unit_of(cap), inner.delta if isinstance(inner, ApproxDp) else 0.0


# An owner's awards, oldest first: what each was paid, and what had left her machine up to then, paid for or not.
dispute_state = case(
    (DisputeRow.id.is_(None), ""), (DisputeRow.state == "decided", "decided"), else_="open"
)  # of the dispute about an award, as everybody is told
_hers = Release.party_id == bindparam("party")
_posted = Release.state == AwardState.POSTED.value
_given = and_(entries.c.ref == Release.award_id, entries.c.kind == EntryKind.RELEASE.value)
_order = (Release.at, Release.task_id, Release.index)
_paid = case((_posted, Release.price_micros), else_=0)
_total = func.max(func.coalesce(entries.c.spent_pico, 0)).over(order_by=_order) / float(PICO)


def statement(
    broker: Broker, party: Party, *, limit: int = _MOST, start: int = 0, newest: bool = False
) -> wire.Statement:
    """Every award of the owner, oldest first (or `newest`), with running totals; or `limit` of them from `start` on."""
    require(party, "owner")
    hers = {"party": party.id}
    with broker.database.read() as session:
        rows = session.execute(_NEWEST if newest else _OLDEST, hers | {"limit": limit, "start": start}).all()
        about = session.execute(_ABOUT, hers | {"window": WINDOW}).one()
        row, awards, earned, delivered, kept, ended, extra = about
        who, known = as_wire(wire.Party, row), reputation(kept, ended)
        held = tuple(wire.Held(*row) for row in session.execute(_HELD, hers))
    releases = []
    for one, name, spec, total, dispute in rows:
        paid = one.price_micros if one.state == AwardState.POSTED else 0
        place = task_words(spec["broker"]["engine"], spec["kind"], trust=spec.get("trust", "local")).place
        told = {"task_name": name, "place": place, "epsilon_total": float(total or 0.0), "paid_micros": paid}
        told["dispute"] = dispute
        releases.append(as_wire(wire.Release, one, **told))
    reached = start + len(releases)
    following = reached if releases and reached < awards else None
    sums_of_all = privacy(broker, party), int(earned), awards, delivered
    return wire.Statement(who, *sums_of_all, tuple(releases), following, known, int(extra or 0), held)


def _held() -> Select[Any]:
    """Her awards in escrow that no statement has yet, as the ledger has them; looked for among her latest."""
    hold, end = entries.alias("hold"), entries.alias("ending")
    latest = select(hold).where(hold.c.owner == bindparam("party"), hold.c.kind == EntryKind.HOLD.value)
    held = latest.order_by(hold.c.seq.desc()).limit(_LATEST).subquery()
    ended = and_(end.c.ref == held.c.ref, end.c.kind.in_([kind.value for kind in RESOLUTIONS.values()]))
    query = select(held.c.ref, TaskRow.id, TaskRow.name, held.c.round_index, held.c.amount_micros, dispute_state)
    query = query.join(TaskRow, TaskRow.id == held.c.debit).outerjoin(end, ended)
    query = query.outerjoin(Release, Release.award_id == held.c.ref)
    query = query.outerjoin(DisputeRow, DisputeRow.award_id == held.c.ref)
    lock = held.c.ref.endswith("/dispute")
    return query.where(end.c.ref.is_(None), Release.award_id.is_(None), ~lock).order_by(held.c.seq.desc())


def credits(whose: ColumnElement[bool], decision: str) -> Select[int]:
    """What the operator credited after disputes that she decided in favour of one side."""
    decided = DisputeRow.state == "decided", DisputeRow.decision == decision
    return select(func.coalesce(func.sum(DisputeRow.credited_micros), 0)).where(whose, *decided)


def history(broker: Broker, party: Party, points: int, *, most: int) -> list[tuple[int, float, int]]:
    """What an owner was paid for (`points` of her awards, as her statement says), as curves: the number of the release,
    ε in total and what she had earned by then; at most so many points, evenly, and always the last."""
    require(party, "owner")
    hers = {"party": party.id}
    with broker.database.read() as session:
        step = max(1, -(-points // most))
        shown = session.execute(_CURVE, hers | {"step": step, "rest": points % step}) if points else ()
        return [(int(place), float(total or 0.0), int(paid)) for place, total, paid in shown]


def paid_in(broker: Broker, party: Party, task_id: str) -> tuple[int, int]:
    """How often an owner was paid in one task, and how much in all."""
    require(party, "owner")
    of_task = func.count(), func.coalesce(func.sum(Release.price_micros), 0)
    with broker.database.read() as session:
        paid, micros = session.execute(
            select(*of_task).where(Release.party_id == party.id, Release.task_id == task_id, _posted)
        ).one()
    return int(paid), int(micros)


def _curve() -> Select[Any]:
    number = func.row_number().over(order_by=_order).label("number")
    earned = func.sum(_paid).over(order_by=_order).label("earned")
    awards = select(Release.award_id, _posted.label("posted"), _total.label("total"))
    spent = awards.outerjoin(entries, _given).where(_hers).subquery()
    sold = select(number, spent.c.total, earned).join(spent, spent.c.award_id == Release.award_id)
    curve = sold.where(_hers, _posted).subquery()
    chosen = curve.c.number % bindparam("step", type_=Integer) == bindparam("rest", type_=Integer)
    return select(curve).where(chosen).order_by(curve.c.number)


# Made once: putting a statement together takes longer than SQLite takes to answer it.
_rows = (
    select(Release, TaskRow.name, TaskRow.spec, _total, dispute_state)
    .join(TaskRow, Release.task_id == TaskRow.id)
    .outerjoin(entries, _given)
    .outerjoin(DisputeRow, DisputeRow.award_id == Release.award_id)
    .where(_hers)
    .limit(bindparam("limit", type_=Integer))
    .offset(bindparam("start", type_=Integer))
)
_OLDEST, _NEWEST = _rows.order_by(*_order), _rows.order_by(*(column.desc() for column in _order))
_sums = select(func.count(), func.coalesce(func.sum(_paid), 0), func.count().filter(_posted)).where(_hers).subquery()
_extra = credits(DisputeRow.owner_id == bindparam("party"), "pay").scalar_subquery()
_ABOUT = select(PartyRow, *_sums.c, *BY_PARTY, _extra).join(_sums, true()).where(PartyRow.id == bindparam("party"))
_HELD, _CURVE = _held(), _curve()


def statement_csv(broker: Broker, party: Party) -> str:
    """The same as a table in the words of the pages, where rounds count from 1; amounts in currency units, exact."""
    return csv_text(
        _HEADER,
        (
            (
                one.at, plain(one.task_name), one.place, one.index + 1, one.epsilon, one.epsilon_total, one.records,
                format_micros(one.price_micros), format_micros(one.paid_micros), AWARD_WORDS.get(one.state, one.state),
                plain(one.reason), one.task_id, one.award_id,
            )
            for one in statement(broker, party).releases
        ),
    )  # fmt: skip


def plain(text: str) -> str:
    """Other people's text, which a spreadsheet must not read as a formula, nor be turned around by."""
    text = without_invisible(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def epsilon_words(epsilon_total: float) -> wire.EpsilonWords:
    """What a total ε lets others learn at most."""
    if epsilon_total <= 0.5:
        verdict = "Very strong: nobody learns much about your data."
    elif epsilon_total <= 2:
        verdict = "Moderate: a suspicion can grow, not become a certainty."
    elif epsilon_total <= 8:
        verdict = "Weak: a determined observer could become nearly sure."
    else:
        verdict = "Hardly any protection against somebody who knows what to look for."
    factor = math.exp(min(epsilon_total, 700.0))
    words = f"{meaning_of(epsilon_total)} Odds grow by at most {factor:.3g}. {verdict}"
    return wire.EpsilonWords(epsilon_total, factor, certainty(epsilon_total), words)
