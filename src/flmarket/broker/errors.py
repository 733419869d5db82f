"""What the broker refuses, each with the HTTP status that the API answers."""

from flmarket.errors import FlmarketError

ANSWERED = "this was done already; its answer held a secret and is not kept"


class BrokerError(FlmarketError):
    """Base of the broker's own refusals."""

    status = 400
    title = "Bad request"


class Unauthenticated(BrokerError):
    """No valid key or session came with the request."""

    status, title = 401, "Not signed in"


class Forbidden(BrokerError):
    """The party's role may not do this."""

    status, title = 403, "Not allowed"


class NotFound(BrokerError):
    """There is no such object, or it belongs to somebody else: the two are not told apart."""

    status, title = 404, "Not found"

    def __init__(self, kind: str, identifier: str) -> None:
        super().__init__(f"there is no {kind} {identifier}")


class Conflict(BrokerError):
    """The object's state does not allow this now."""

    status, title = 409, "Conflict"


class KeyReused(Conflict):
    """An idempotency key came back with another request: nothing was done."""

    status, title = 422, "Idempotency key reused"


class UnderWay(Conflict):
    """A request with the same idempotency key is being carried out; `retry_after` seconds from now it may be done."""

    retry_after = 1.0


class TooLarge(BrokerError):
    """The request's body is larger than the service takes."""

    status, title = 413, "Too large"


class TooMany(BrokerError):
    """Too many requests; `retry_after` seconds from now there is room again."""

    status, title = 429, "Too many requests"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
