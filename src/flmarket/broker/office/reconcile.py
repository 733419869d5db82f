"""Do the broker's rows say what the ledger did? One look at both, in one transaction, and a list of what disagrees.

`SqlLedger.verify` shows that the log is sound by itself; this shows that bills, statements and tasks follow from it:

    funding    a task's budget came into its account, and no account was funded without a task
    bill       what a task, a round and a refund are said to have cost is what the ledger paid
    escrow     nothing is held for a round that is over, and nothing is left with a task that has ended
    round      a task that has ended has no round under way
    award      every award in a row is on the ledger, and every award of a round that is over is in a row
    statement  state, price, privacy and owner of an award in a row are the ledger's
    release    nobody gave away more privacy than her award was for
    dispute    an award that is frozen in escrow has an open dispute, and one that was decided ended as decided, or the
               operator's credit is there
    payout     every payout that is said to be booked is a withdrawal of that party in the ledger, and every withdrawal
               for a payout is said to be booked

Of a task under way only the rounds that are over are looked at: the ledger is always ahead of the rows in the one that
is being played. Where awards run over all rounds (`OwnerSide.lasting`) that is the task as a whole, once it is over.
What would break it: a connection that does not see one moment of both, so it reads in one snapshot.
"""

import json
from collections.abc import Iterator
from itertools import chain, islice

from sqlalchemy import ColumnElement, Connection, Engine, and_, case, exists, func, select

from flmarket.broker.books import shown_epsilon, slot_account
from flmarket.broker.stamps import now
from flmarket.broker.tables import DisputeRow, PartyRow, PayoutRow, Release, RoundRow, TaskRow
from flmarket.client.wire import ENDED, Finding
from flmarket.ledger.entry import RESOLUTIONS, EntryKind, Line, fits, loss_of, release_of
from flmarket.ledger.store import accounts, entries
from flmarket.market import kinds

RECONCILE = "reconcile"
_MOST = 100
_BOOKING_MS = 60_000  # in which a payout is booked
_ENDS = [kind.value for kind in RESOLUTIONS.values()]

hold, end, given = entries.alias("hold"), entries.alias("ending"), entries.alias("given")
_ended = and_(end.c.ref == hold.c.ref, end.c.kind.in_(_ENDS))
_is_hold = hold.c.kind == EntryKind.HOLD.value
_is_refund = hold.c.ref.endswith("/refund")  # of a task, or of an award after its dispute
_is_lock = hold.c.ref.endswith("/dispute")
_ALL_ROUNDS = -1  # instead of an index, where awards are for all rounds


def reconcile(engine: Engine) -> tuple[Finding, ...]:
    """Everything that does not agree, at most 100 findings; none is good news."""
    rules = (_funding, _orphans, _bills, _escrow, _rounds, _unlisted, _statements, _releases, _disputes, _payouts)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            return tuple(islice(chain.from_iterable(rule(connection) for rule in rules), _MOST))


def _payouts(connection: Connection) -> Iterator[Finding]:
    out = and_(entries.c.ref == PayoutRow.id, entries.c.kind == EntryKind.WITHDRAWAL.value)
    query = select(PayoutRow.id, PayoutRow.party_id, PayoutRow.amount_micros, entries.c.debit, entries.c.amount_micros)
    query = query.outerjoin(entries, out).where(PayoutRow.state != "new")
    for payout, party, said, account, moved in connection.execute(query):
        if (account, moved) != (party, said):
            yield Finding("payout", payout, f"{said} micro-units of {party} are said to be out, the ledger has {moved}")
    left = entries.c.ref.startswith("w_"), entries.c.kind == EntryKind.WITHDRAWAL.value
    lost = select(entries.c.ref, entries.c.amount_micros).outerjoin(PayoutRow, out).where(*left)
    lost = lost.where(entries.c.time_us < 1000 * (now() - _BOOKING_MS), func.coalesce(PayoutRow.state, "new") == "new")
    for payout, moved in connection.execute(lost):
        yield Finding("payout", payout, f"{moved} micro-units have left the books, and no payout says so")


def _funding(connection: Connection) -> Iterator[Finding]:
    ref = and_(_is_hold, hold.c.ref == TaskRow.id + "/escrow")
    query = select(TaskRow.id, TaskRow.escrow_micros, hold.c.amount_micros, end.c.kind)
    query = query.outerjoin(hold, ref).outerjoin(end, _ended).where(TaskRow.state != "funding")
    for task, said, held, ending in connection.execute(query):
        came = (held or 0) if ending == EntryKind.POSTED else 0
        if came != said:
            yield Finding("funding", task, f"its escrow is said to be {said} micro-units, the ledger moved {came}")


def _orphans(connection: Connection) -> Iterator[Finding]:
    query = select(hold.c.ref, hold.c.amount_micros).join(PartyRow, PartyRow.id == hold.c.debit)
    query = query.outerjoin(TaskRow, TaskRow.id == hold.c.owner)
    lost = and_(_is_hold, hold.c.ref == hold.c.owner + "/escrow", TaskRow.id.is_(None), hold.c.amount_micros > 0)
    for ref, amount in connection.execute(query.where(lost)):
        yield Finding("funding", ref, f"{amount} micro-units were set aside for a task that is not there")


def _bills(connection: Connection) -> Iterator[Finding]:
    refund = _is_refund
    moved = select(TaskRow.id, hold.c.round_index, refund.label("back"), func.sum(end.c.amount_micros))
    moved = moved.join(hold, and_(_is_hold, hold.c.debit == TaskRow.id)).join(end, _ended)
    moved = moved.where(end.c.kind == EntryKind.POSTED.value).group_by(TaskRow.id, hold.c.round_index, refund)
    tasks = select(
        TaskRow.id, TaskRow.state, TaskRow.rounds, TaskRow.rounds_done, TaskRow.spent_micros, TaskRow.refunded_micros,
        _lasting().label("lasting"),
    )  # fmt: skip
    found = connection.execute(tasks).all()
    lasting = {row.id for row in found if row.lasting}
    paid: dict[tuple[str, int], int] = {}
    said: dict[tuple[str, int], int] = {}
    back: dict[str, int] = {}
    for task, index, is_refund, amount in connection.execute(moved):
        if is_refund:
            back[task] = back.get(task, 0) + int(amount)
        else:
            paid[task, _ALL_ROUNDS if task in lasting else index] = int(amount)
    for task, index, cost in connection.execute(select(RoundRow.task_id, RoundRow.index, RoundRow.spent_micros)):
        key = task, _ALL_ROUNDS if task in lasting else index
        said[key] = said.get(key, 0) + cost
    total: dict[str, int] = {}
    live = {row.id: row.rounds_done for row in found if row.state not in ENDED}
    unpaid = {row.id for row in found if row.lasting and row.id in live and row.rounds_done < row.rounds}
    for task, index in sorted(paid.keys() | said.keys()):
        if task in unpaid or (task in live and index >= live[task]):
            continue  # it is being played
        cost, billed = paid.get((task, index), 0), said.get((task, index), 0)
        total[task] = total.get(task, 0) + cost
        if cost != billed:
            subject = task if index == _ALL_ROUNDS else f"{task}/{index}"
            yield Finding("bill", subject, f"its rounds' bills are {billed} micro-units, the ledger paid {cost}")
    for row in found:
        if row.spent_micros != total.get(row.id, 0):
            paid_for = total.get(row.id, 0)
            yield Finding("bill", row.id, f"the bill is {row.spent_micros} micro-units, the ledger paid {paid_for}")
        if row.id not in live and row.refunded_micros != back.get(row.id, 0):
            came = back.get(row.id, 0)
            yield Finding("bill", row.id, f"{row.refunded_micros} micro-units are said to be refunded, {came} were")


def _escrow(connection: Connection) -> Iterator[Finding]:
    open_ = select(hold.c.ref, hold.c.amount_micros).outerjoin(end, _ended)
    mine = TaskRow.id.in_([hold.c.debit, hold.c.owner])
    award = and_(hold.c.debit == TaskRow.id, ~_is_refund)
    over = TaskRow.state.in_(ENDED) | and_(award, _round_over())
    lock = entries.alias("lock")
    frozen = and_(
        exists().where(DisputeRow.award_id == hold.c.ref, DisputeRow.state != "decided"),
        exists().where(lock.c.ref == hold.c.ref + "/dispute", lock.c.kind == EntryKind.HOLD.value),
    )
    open_ = open_.join(TaskRow, mine).where(_is_hold, end.c.ref.is_(None), over, ~frozen, ~_is_lock)
    for ref, amount in connection.execute(open_):
        yield Finding("escrow", ref, f"{amount} micro-units are held for what is over")
    left = select(accounts.c.name, accounts.c.balance).join(TaskRow, TaskRow.id == accounts.c.name)
    for name, balance in connection.execute(left.where(TaskRow.state.in_(ENDED), accounts.c.balance != 0)):
        yield Finding("escrow", name, f"{balance} micro-units are left with a task that has ended")


def _rounds(connection: Connection) -> Iterator[Finding]:
    query = select(RoundRow.task_id, RoundRow.index, RoundRow.state).join(TaskRow, TaskRow.id == RoundRow.task_id)
    for task, index, state in connection.execute(query.where(TaskRow.state.in_(ENDED), RoundRow.closed_at.is_(None))):
        yield Finding("round", f"{task}/{index}", f"the round is {state}, its task has ended")


def _unlisted(connection: Connection) -> Iterator[Finding]:
    """Awards on the ledger that no row knows, in rounds that are over."""
    query = select(hold.c.ref).join(TaskRow, TaskRow.id == hold.c.debit)
    query = query.outerjoin(Release, Release.award_id == hold.c.ref)
    over = TaskRow.state.in_(ENDED) | _round_over()
    query = query.where(_is_hold, Release.award_id.is_(None), ~_is_refund, ~_is_lock, over)
    for ref in connection.scalars(query):
        yield Finding("award", ref, "the ledger has this award, no statement has it")


def _statements(connection: Connection) -> Iterator[Finding]:
    query = select(Release.__table__, hold.c.amount_micros, hold.c.owner, hold.c.detail, end.c.kind.label("ending"))
    query = query.outerjoin(hold, and_(_is_hold, hold.c.ref == Release.award_id)).outerjoin(end, _ended)
    for row in connection.execute(query, execution_options={"yield_per": 1000}):
        if row.detail is None:
            yield Finding("award", row.award_id, "a statement has this award, the ledger does not")
            continue
        epsilon = shown_epsilon(loss_of(json.loads(row.detail)))
        said = (row.state, row.price_micros, row.epsilon, row.party_id or slot_account(row.task_id, row.slot))
        if said != (known := (row.ending or "pending", row.amount_micros, epsilon, row.owner)):
            yield Finding("statement", row.award_id, f"the statement says {said}, the ledger {known}")


def _releases(connection: Connection) -> Iterator[Finding]:
    query = select(hold.c.ref, hold.c.detail, given.c.detail.label("gave"))
    query = query.join(given, and_(given.c.ref == hold.c.ref, given.c.kind == EntryKind.RELEASE.value)).where(_is_hold)
    for ref, terms, gave in connection.execute(query, execution_options={"yield_per": 1000}):
        loss, left = loss_of(json.loads(terms)), release_of(Line(EntryKind.RELEASE, ref, detail=gave))
        if not fits(left, loss):
            yield Finding("release", ref, f"the award is for {loss}, {left.guarantee} was given away")


def _disputes(connection: Connection) -> Iterator[Finding]:
    lock = select(hold.c.ref, DisputeRow.state).outerjoin(DisputeRow, DisputeRow.award_id + "/dispute" == hold.c.ref)
    lock = lock.outerjoin(end, _ended).where(_is_hold, _is_lock, end.c.ref.is_(None))
    for ref, state in connection.execute(lock):
        if state not in ("open", "deciding"):
            yield Finding("dispute", ref, "the award is frozen in escrow, and nobody disputes it")
    credit = and_(entries.c.ref == DisputeRow.id, entries.c.kind == EntryKind.DEPOSIT.value)
    last = and_(end.c.ref == DisputeRow.award_id, end.c.kind.in_(_ENDS))
    query = select(DisputeRow.__table__, end.c.kind, entries.c.credit, entries.c.amount_micros).outerjoin(end, last)
    query = query.outerjoin(entries, credit).where(DisputeRow.state == "decided")
    for row in connection.execute(query):
        paid, pays = row.kind == EntryKind.POSTED, row.decision == "pay"
        owed = row.price_micros if paid != pays and (not pays or row.owner_id) else 0
        payee = (row.owner_id if pays else row.buyer_id) if owed else None
        said, known = (row.credited_micros, payee), (row[-1] or 0, row[-2])
        if row.kind is None or said != known or owed != known[0]:
            told = f"decided {row.decision} with a credit of {said}; the ledger has {row.kind} and {known}"
            yield Finding("dispute", row.id, told)


def _lasting() -> ColumnElement[bool]:
    """Whether a task's awards run over all rounds: held in the first, they end in the last."""
    names = [name for name in kinds.names() if kinds.of(name).side.lasting]
    kind: ColumnElement[str] = TaskRow.spec["kind"].as_string()
    return kind.in_(names)


def _round_over() -> ColumnElement[bool]:
    """Whether the last round that an award is for is over, of a task under way."""
    last: ColumnElement[int] = case((_lasting(), TaskRow.rounds - 1), else_=hold.c.round_index)
    return last < TaskRow.rounds_done
