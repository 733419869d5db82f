"""The generated style sheet, and the page for addresses that lead nowhere."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from flmarket.broker.errors import NotFound
from flmarket.broker.pages.context import PageRoute
from flmarket.broker.pages.rendering import theme_css

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/theme.css")
def theme() -> Response:
    """The report's colours; the address changes with the content."""
    return Response(
        theme_css(), media_type="text/css", headers={"Cache-Control": "public, max-age=31536000, immutable"}
    )


@router.get("/{path:path}")
def nowhere(request: Request, path: str) -> Response:
    """No such page. Programs, which ask below /api, get the API's own answer."""
    if path == "api" or path.startswith("api/"):
        raise HTTPException(404, "there is no such address")
    raise NotFound("page", path)
