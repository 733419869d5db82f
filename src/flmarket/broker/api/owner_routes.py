"""An owner's side: offers, bids, her statement and her privacy."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from flmarket.broker.api.idempotency import IdempotencyKey, IdempotentRoute
from flmarket.broker.api.parameters import Before, Identifier, Limit
from flmarket.broker.api.problems import PROBLEMS, file_response
from flmarket.broker.auth import CurrentBroker, CurrentParty, get_gate
from flmarket.broker.schemas import BidHelpRequest, BidRequest, CapRequest
from flmarket.broker.services import explore, offers, statements
from flmarket.broker.services.views import BidHelpView, BidView, OfferPage, OfferView, PrivacyView, StatementView

__all__ = ["router"]

router = APIRouter(tags=["owners"], route_class=IdempotentRoute, responses=PROBLEMS)


@router.get("/offers")
def list_offers(broker: CurrentBroker, party: CurrentParty, limit: Limit = 50, before: Before = None) -> OfferPage:
    """Tasks that I can sell to."""
    return offers.list_offers(broker, party, limit=limit, before=before)


@router.get("/offers/{task_id}")
def get_offer(broker: CurrentBroker, party: CurrentParty, task_id: Identifier) -> OfferView:
    """One offer, with my place and my bid."""
    return offers.get_offer(broker, party, task_id)


@router.get("/offers/{task_id}/bid")
def get_bid(broker: CurrentBroker, party: CurrentParty, task_id: Identifier) -> BidView:
    """My standing bid."""
    return offers.my_bid(broker, party, task_id)


@router.put("/offers/{task_id}/bid")
def place_bid(
    broker: CurrentBroker, party: CurrentParty, task_id: Identifier, body: BidRequest, key: IdempotencyKey = None
) -> BidView:
    """Bid, or replace my bid. It counts in every round until I replace or withdraw it."""
    return offers.place_bid(broker, party, task_id, body)


@router.delete("/offers/{task_id}/bid")
def withdraw_bid(
    broker: CurrentBroker, party: CurrentParty, task_id: Identifier, key: IdempotencyKey = None
) -> BidView:
    """Stay out of later rounds."""
    return offers.withdraw_bid(broker, party, task_id)


@router.get("/me/statement")
def statement(broker: CurrentBroker, party: CurrentParty) -> StatementView:
    """Everything I sold, earned and gave up."""
    return statements.statement(broker, party)


@router.get("/me/statement.csv", response_class=Response, responses=file_response("text/csv"))
def statement_csv(broker: CurrentBroker, party: CurrentParty) -> Response:
    """The same as a table."""
    headers = {"Content-Disposition": 'attachment; filename="statement.csv"'}
    return Response(statements.statement_csv(broker, party), media_type="text/csv", headers=headers)


@router.get("/me/privacy")
def privacy(broker: CurrentBroker, party: CurrentParty) -> PrivacyView:
    """My total ε, spent and left."""
    return statements.privacy(broker, party)


@router.put("/me/privacy")
def set_cap(broker: CurrentBroker, party: CurrentParty, body: CapRequest, key: IdempotencyKey = None) -> PrivacyView:
    """Set the most ε that I give up in total; not below what I gave up already."""
    return statements.set_cap(broker, party, body.cap_epsilon_total)


@router.post("/bid-help")
async def bid_help(
    request: Request, broker: CurrentBroker, party: CurrentParty, body: BidHelpRequest, key: IdempotencyKey = None
) -> BidHelpView:
    """What a bid would earn, and what its ε means on top of all I gave up before. Nothing is placed."""
    return await get_gate(request).heavy.run(party.id, lambda: explore.bid_help(broker, party, body))
