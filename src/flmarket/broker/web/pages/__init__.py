"""The web market: Jinja2 pages over the same services as the API, brought alive by HTMX and server-sent events.

`ROUTERS` has everything, with a page for what does not exist; `mount` adds the static files from inside the package.
Pages never load anything from elsewhere and run no inline script or style, so the strictest content policy holds.
"""

from fastapi import FastAPI
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from flmarket.broker.web.pages import (
    account,
    audit,
    disputes,
    evaluations,
    front,
    ledger,
    listing,
    live,
    operator,
    owner,
    posting,
    reference,
    tasks,
)
from flmarket.broker.web.pages.context import too_large
from flmarket.broker.web.pages.rendering import STATIC_PATH

__all__ = ["ROUTERS", "mount", "too_large"]


class _Static(StaticFiles):
    """Files whose address holds a digest of their content: a browser need never ask for one again."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file, to be kept."""
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def mount(app: FastAPI) -> None:
    """Add the static files to an application whose state has a broker and a gate."""
    app.mount(STATIC_PATH, _Static(packages=[("flmarket.broker.web", "static")]), name="static")


# `posting` and `evaluations` come before `tasks`: /tasks/new is not a task; addresses that lead nowhere come last.
_PARTS = front, account, posting, evaluations, live, listing, tasks, owner, disputes, audit, ledger, operator, reference
ROUTERS = (*(part.router for part in _PARTS), front.last_router)
