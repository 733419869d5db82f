"""A buyer's tasks, from the order to the model."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from flmarket.broker.api.idempotency import IdempotencyKey, IdempotentRoute
from flmarket.broker.api.parameters import Before, Identifier, Index, Limit, Start
from flmarket.broker.api.problems import PROBLEMS, file_response
from flmarket.broker.auth import CurrentBroker, CurrentParty, get_gate
from flmarket.broker.model_files import ModelFormat
from flmarket.broker.schemas import ExploreRequest, TaskRequest
from flmarket.broker.services import explore, tasks
from flmarket.broker.services.views import (
    BillView,
    ExploreView,
    ReceiptPage,
    RoundDetail,
    RoundPage,
    TaskPage,
    TaskView,
)

__all__ = ["router"]

router = APIRouter(tags=["tasks"], route_class=IdempotentRoute, responses=PROBLEMS)


@router.post("/tasks", status_code=201)
def post_task(broker: CurrentBroker, party: CurrentParty, body: TaskRequest, key: IdempotencyKey = None) -> TaskView:
    """Post a task. Its whole budget goes into escrow; what is not spent comes back."""
    return tasks.post_task(broker, party, body, key=key)


@router.get("/tasks")
def list_tasks(broker: CurrentBroker, party: CurrentParty, limit: Limit = 50, before: Before = None) -> TaskPage:
    """My tasks (the operator: all), newest first."""
    return tasks.list_tasks(broker, party, limit=limit, before=before)


@router.get("/tasks/{task_id}")
def get_task(broker: CurrentBroker, party: CurrentParty, task_id: Identifier) -> TaskView:
    """One task."""
    return tasks.get_task(broker, party, task_id)


@router.post("/tasks/{task_id}/cancel")
def cancel_task(
    broker: CurrentBroker, party: CurrentParty, task_id: Identifier, key: IdempotencyKey = None
) -> TaskView:
    """Stop after the round being played; the rest of the escrow comes back."""
    return tasks.cancel_task(broker, party, task_id)


@router.get("/tasks/{task_id}/rounds")
def list_rounds(
    broker: CurrentBroker, party: CurrentParty, task_id: Identifier, limit: Limit = 500, start: Start = 0
) -> RoundPage:
    """The rounds so far."""
    return tasks.rounds(broker, party, task_id, limit=limit, start=start)


@router.get("/tasks/{task_id}/rounds/{index}")
def get_round(broker: CurrentBroker, party: CurrentParty, task_id: Identifier, index: Index) -> RoundDetail:
    """One round and its awards."""
    return tasks.round_detail(broker, party, task_id, index)


@router.get("/tasks/{task_id}/rounds/{index}/receipts")
def get_receipts(broker: CurrentBroker, party: CurrentParty, task_id: Identifier, index: Index) -> ReceiptPage:
    """The ledger's receipts of a round, each with proofs; an owner gets her own."""
    return tasks.receipts(broker, party, task_id, index)


@router.get("/tasks/{task_id}/bill")
def get_bill(broker: CurrentBroker, party: CurrentParty, task_id: Identifier) -> BillView:
    """What was paid for."""
    return tasks.bill(broker, party, task_id)


@router.get("/tasks/{task_id}/model", response_class=Response, responses=file_response("application/octet-stream"))
def get_model(broker: CurrentBroker, party: CurrentParty, task_id: Identifier, format: ModelFormat = "npz") -> Response:
    """The trained model, for the buyer who paid for it."""
    file = tasks.model(broker, party, task_id, format=format)
    headers = {"Content-Disposition": f'attachment; filename="{file.name}"'}
    return Response(file.content, media_type=file.media_type, headers=headers)


@router.post("/explore")
async def explore_budgets(
    request: Request, broker: CurrentBroker, party: CurrentParty, body: ExploreRequest, key: IdempotencyKey = None
) -> ExploreView:
    """What different budgets would buy, before posting a task. Nothing is posted and nothing is paid.

    A party has one under way and one that waits; more are refused (429).
    """
    return await get_gate(request).heavy.run(party.id, lambda: explore.explore(broker, party, body))
