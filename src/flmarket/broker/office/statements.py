"""What an owner sold, earned and gave up: the statement, as values or as CSV, and her lifetime cap; and her privacy in
plain words, always from the total of everything she gave up (`flmarket.trust`)."""

import csv
import io
import math

from sqlalchemy import select

from flmarket.broker.core import Broker, Party, require
from flmarket.broker.errors import Conflict
from flmarket.broker.office.operator import note
from flmarket.broker.tables import PartyRow, Release, TaskRow, as_wire
from flmarket.client import wire
from flmarket.errors import PrivacyBudgetExhausted
from flmarket.ledger import AwardState, format_micros
from flmarket.privacy import PureDp
from flmarket.trust import certainty, meaning_of, task_words

_MOST = 100_000
_HEADER = (
    "time", "task", "task name", "round", "epsilon this round", "epsilon total", "records", "awarded", "paid", "state",
    "reason", "award", "records and noise",
)  # fmt: skip


def privacy(broker: Broker, party: Party) -> wire.Privacy:
    """Total ε spent and left over all tasks, as the ledger counts it."""
    require(party, "owner")
    registered, spent = broker.books.privacy(party.id)
    cap = registered or 0.0
    left = max(0.0, cap - spent)
    if cap <= 0:
        words = "You have no cap yet: set one before you bid."
    elif left:
        words = (
            f"All your releases together cost at most ε = {spent:.4g} in total; {left:.3g} of {cap:.4g} "
            f"({100 * left / cap:.0f} %) is left under your cap. {meaning_of(cap)}"
        )
    else:
        sold = f"You have sold all the privacy that you were willing to sell, ε = {cap:.4g} in total: no more is sold."
        words = f"{sold} {meaning_of(cap)}"
    return wire.Privacy(cap, spent, left, words)


def set_cap(broker: Broker, party: Party, cap_epsilon_total: float) -> wire.Privacy:
    """Change one's own cap; never below what was released already."""
    require(party, "owner")
    try:
        broker.books.ledger.register_cap(party.id, PureDp(cap_epsilon_total))
    except PrivacyBudgetExhausted:
        spent = broker.books.privacy(party.id)[1]
        raise Conflict(f"you have given up ε = {spent:.6g} in total already; a cap below that is not kept") from None
    with broker.database.write() as session:
        note(session, party, "cap.set", party.id, detail=f"{cap_epsilon_total:g}")
    return privacy(broker, party)


def statement(broker: Broker, party: Party) -> wire.Statement:
    """Every award of the owner, oldest first, with running totals."""
    require(party, "owner")
    query = (
        select(Release, TaskRow.name, TaskRow.spec)
        .join(TaskRow, Release.task_id == TaskRow.id)
        .where(Release.party_id == party.id)
        .order_by(Release.at, Release.task_id, Release.index)
        .limit(_MOST)
    )
    with broker.database.read() as session:
        rows = session.execute(query).all()
        who = as_wire(wire.Party, session.get_one(PartyRow, party.id))
    left = {release.award_id for release in broker.books.ledger.releases(party.id)}
    releases, total, earned, delivered = [], 0.0, 0, 0
    for one, name, spec in rows:
        paid = one.price_micros if one.state == AwardState.POSTED else 0
        if one.award_id in left:
            total += one.epsilon  # it left her machine, whether it was paid or not
        earned += paid
        delivered += one.state == AwardState.POSTED
        place = task_words(spec["broker"]["engine"], spec["kind"], trust=spec.get("trust", "local")).place
        releases.append(as_wire(wire.Release, one, task_name=name, place=place, epsilon_total=total, paid_micros=paid))
    return wire.Statement(who, privacy(broker, party), earned, len(releases), delivered, tuple(releases))


def statement_csv(broker: Broker, party: Party) -> str:
    """The same as a table; amounts in currency units, exact."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(_HEADER)
    for one in statement(broker, party).releases:
        amounts = (format_micros(one.price_micros), format_micros(one.paid_micros))
        cells = (one.at, one.task_id, _plain(one.task_name), one.index, one.epsilon, one.epsilon_total, one.records)
        writer.writerow((*cells, *amounts, one.state, _plain(one.reason), one.award_id, one.place))
    return out.getvalue()


def _plain(text: str) -> str:
    """A buyer chooses the task's name; a spreadsheet must not read it as a formula."""
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
