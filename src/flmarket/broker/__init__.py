"""The broker: an HTTP service where buyers, data owners and the operator meet, over market, ledger and engines.

`app.create_app(settings)` builds the service; `services` holds everything it can do, free of HTTP, so that the API and
the web pages are two views of the same functions.
"""

from flmarket.broker.settings import Settings

__all__ = ["Settings"]
