"""What a client can meet: a refusal with its reasons, or nobody at the other end."""

from __future__ import annotations

from collections.abc import Mapping

from flmarket.errors import FlmarketError

__all__ = ["BrokerRefused", "BrokerUnreachable"]


class BrokerUnreachable(FlmarketError):
    """The broker did not answer, also not when asked again."""

    exit_code = 11


class BrokerRefused(FlmarketError):
    """The broker said no: `status` is HTTP's, `fields` maps each field that was not accepted to the reason."""

    exit_code = 12

    def __init__(self, status: int, detail: str, fields: Mapping[str, str] | None = None) -> None:
        self.status, self.detail, self.fields = status, detail, dict(fields or {})
        reasons = "; ".join(f"{field}: {reason}" for field, reason in self.fields.items())
        super().__init__(f"{detail} ({reasons})" if reasons else detail)
