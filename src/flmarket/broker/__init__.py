"""The broker: an HTTP service where buyers, data owners and the operator meet, over market, ledger and engines.

`app.create_app(settings)` builds the service; three folders hold the rest:

    office/   what parties and the operator do, free of HTTP, so that API and pages are two views of the same functions
    work/     what happens by itself: rounds, Flower runs, audits, endings
    web/      the HTTP service: API, pages, streams, and the door in front of them
"""

from flmarket.broker.settings import Settings

__all__ = ["Settings"]
