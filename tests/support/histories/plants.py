"""Bugs to put into a service's process: each makes promises that histories must show to be broken."""

import random
import time


def _key_ignored():
    """A repeated write is carried out again."""
    from flmarket.broker.office import parties, tasks
    from flmarket.broker.stamps import new_id
    from flmarket.broker.web import idempotency

    idempotency._Begun.check = lambda *args: None
    idempotency._begin = lambda broker, party, key, digest: idempotency._Begun(broker, party.id, key, 0)
    for module in (parties, tasks):
        module.derived_id = lambda kind, *parts: new_id(kind)


def _stale_balance():
    """Balances are kept for ten seconds, by each process."""
    from flmarket.ledger import SqlLedger

    kept, balance = {}, SqlLedger.balance

    def stale(self, name):
        at, value = kept.get(name, (0.0, 0))
        if time.monotonic() - at > 10.0:
            value = balance(self, name)
            kept[name] = time.monotonic(), value
        return value

    SqlLedger.balance = stale


def _deposit_lost():
    """Half of the deposits are acknowledged and not booked."""
    from flmarket.ledger import SqlLedger

    deposit = SqlLedger.deposit

    def forgetful(self, *args, **kwargs):
        return None if random.random() < 0.5 else deposit(self, *args, **kwargs)

    SqlLedger.deposit = forgetful


PLANTS = {"key ignored": _key_ignored, "stale balance": _stale_balance, "deposit lost": _deposit_lost}
