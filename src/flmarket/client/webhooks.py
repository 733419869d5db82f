"""Signatures of webhooks: how the broker signs what it sends, and how a receiver checks it.

The scheme is that of Standard Webhooks (standardwebhooks.com, version 1), for which there are libraries in most
languages: `webhook-signature` holds `v1,` and the Base64 of HMAC-SHA256 over `<webhook-id>.<webhook-timestamp>.<body>`,
under the bytes that the secret has in Base64 after `whsec_`. The timestamp is that of the attempt, the id is the same
in every attempt: a message may come more than once, and whoever keeps ids acts on it once.

What would break it: a receiver that parses the body and signs its own rendering of it, or takes any timestamp.
"""

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping

from flmarket.errors import FlmarketError

PREFIX = "whsec_"
TOLERANCE_SECONDS = 300.0


class BadSignature(FlmarketError):
    """What came is not what the broker sent to this receiver, or it is too old."""


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers that go with a body."""
    content = b"%s.%d.%s" % (message_id.encode(), timestamp, body)
    digest = hmac.new(_key(secret), content, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def verify(
    secret: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance: float = TOLERANCE_SECONDS,
    now: float | None = None,
) -> str:
    """The id of a message that the broker signed at most `tolerance` seconds ago; BadSignature for anything else.

    `body` is what came, byte for byte; names in `headers` may be in any case.
    """
    given = {name.lower(): value for name, value in headers.items()}
    message_id, stamp = given.get("webhook-id", ""), given.get("webhook-timestamp", "")
    if not message_id or not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 12):
        raise BadSignature("the headers webhook-id and webhook-timestamp are missing or no such thing")
    expected = sign(secret, message_id, int(stamp), body)["webhook-signature"].encode()
    signatures = given.get("webhook-signature", "").split(" ")
    if not any(hmac.compare_digest(expected, one.encode()) for one in signatures):
        raise BadSignature("the signature is not of this id, this time and this body under this secret")
    if abs((time.time() if now is None else now) - int(stamp)) > tolerance:
        raise BadSignature(f"the message was sent more than {tolerance:g} seconds from now")
    return message_id


def _key(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except ValueError:
        raise BadSignature(f"the secret is not one: {PREFIX} and Base64") from None
