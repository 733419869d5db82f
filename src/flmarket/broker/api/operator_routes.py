"""The operator's side, and audits, which anybody may run."""

from __future__ import annotations

from fastapi import APIRouter, Request

from flmarket.broker.api.idempotency import IdempotencyKey, IdempotentRoute, keep_secret
from flmarket.broker.api.parameters import After, Before, Identifier, Limit
from flmarket.broker.api.problems import PROBLEMS
from flmarket.broker.auth import CurrentBroker, CurrentParty
from flmarket.broker.core import require
from flmarket.broker.schemas import AuditRequest, DepositRequest, KeyRequest, NodeRequest, PartyRequest
from flmarket.broker.services import audits, ledger, log, operator, parties
from flmarket.broker.services.views import (
    AccountView,
    AuditPage,
    AuditView,
    LedgerCheck,
    LogPage,
    NewKey,
    OperatorView,
    PartyPage,
    PartyView,
)

__all__ = ["audit_router", "router"]

router = APIRouter(prefix="/operator", tags=["operator"], route_class=IdempotentRoute, responses=PROBLEMS)
audit_router = APIRouter(tags=["audits"], route_class=IdempotentRoute, responses=PROBLEMS)


@router.get("/status")
def status(broker: CurrentBroker, party: CurrentParty) -> OperatorView:
    """Queues and health."""
    return operator.status(broker, party)


@router.get("/parties")
def list_parties(broker: CurrentBroker, party: CurrentParty, limit: Limit = 100, after: Before = None) -> PartyPage:
    """All parties."""
    return parties.list_parties(broker, party, limit=limit, after=after)


@router.post("/parties", status_code=201)
def create_party(
    broker: CurrentBroker, party: CurrentParty, body: PartyRequest, key: IdempotencyKey = None
) -> PartyView:
    """Somebody new."""
    return parties.create_party(broker, party, role=body.role, name=body.name)


@router.post("/parties/{party_id}/close")
def close_party(
    broker: CurrentBroker, party: CurrentParty, party_id: Identifier, key: IdempotencyKey = None
) -> PartyView:
    """Keys and sessions of the party stop working; her money stays hers."""
    return parties.set_active(broker, party, party_id, active=False)


@router.post("/parties/{party_id}/reopen")
def reopen_party(
    broker: CurrentBroker, party: CurrentParty, party_id: Identifier, key: IdempotencyKey = None
) -> PartyView:
    """Keys and sessions of the party work again."""
    return parties.set_active(broker, party, party_id, active=True)


@router.put("/parties/{party_id}/node")
def bind_node(
    broker: CurrentBroker, party: CurrentParty, party_id: Identifier, body: NodeRequest, key: IdempotencyKey = None
) -> PartyView:
    """Which SuperNode is an owner's, so that she can sell in Flower tasks."""
    return parties.bind_node(broker, party, party_id, node_id=body.node_id, number=body.number)


@router.delete("/parties/{party_id}/node")
def unbind_node(
    broker: CurrentBroker, party: CurrentParty, party_id: Identifier, key: IdempotencyKey = None
) -> PartyView:
    """The owner takes no part in further rounds of Flower tasks."""
    return parties.unbind_node(broker, party, party_id)


@router.post("/parties/{party_id}/keys", status_code=201)
def issue_key(
    request: Request,
    broker: CurrentBroker,
    party: CurrentParty,
    party_id: Identifier,
    body: KeyRequest,
    key: IdempotencyKey = None,
) -> NewKey:
    """A key for a party; its secret is shown this once."""
    require(party, "operator")
    keep_secret(request)
    return parties.issue_key(broker, party, party_id, label=body.label)


@router.post("/parties/{party_id}/deposits", status_code=201)
def deposit(
    broker: CurrentBroker,
    party: CurrentParty,
    party_id: Identifier,
    body: DepositRequest,
    key: IdempotencyKey = None,
) -> AccountView:
    """Book money that a buyer paid in."""
    return parties.deposit(broker, party, party_id, body.amount_micros, key=key)


@router.get("/audit-log")
def audit_log(
    broker: CurrentBroker, party: CurrentParty, limit: Limit = 100, before: After = None, about: Before = None
) -> LogPage:
    """Who did what, newest first."""
    return log.audit_log(broker, party, limit=limit, before=before, about=about)


@router.post("/ledger/verify")
def verify_ledger(broker: CurrentBroker, party: CurrentParty, key: IdempotencyKey = None) -> LedgerCheck:
    """Replay the whole log and say what was found."""
    return ledger.verify(broker, party)


@audit_router.post("/audits", status_code=202)
def start_audit(
    broker: CurrentBroker, party: CurrentParty, body: AuditRequest, key: IdempotencyKey = None
) -> AuditView:
    """Run the auditor on a mechanism, in the background."""
    return audits.start_audit(broker, party, body, key=key)


@audit_router.get("/audits")
def list_audits(broker: CurrentBroker, party: CurrentParty, limit: Limit = 50) -> AuditPage:
    """My audits."""
    return audits.list_audits(broker, party, limit=limit)


@audit_router.get("/audits/{audit_id}")
def get_audit(broker: CurrentBroker, party: CurrentParty, audit_id: Identifier) -> AuditView:
    """One audit: its progress, and then its verdict."""
    return audits.get_audit(broker, party, audit_id)
