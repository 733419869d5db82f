"""Signing in with an OpenID Connect provider: the authorization code flow with PKCE (OpenID Connect Core 1.0, 3.1; RFC
7636). Which person it is, and whether she may come in, is decided elsewhere (`office.users`).

What is remembered between leaving for the provider and coming back (state, nonce, PKCE verifier) is in a signed cookie
of ten minutes: a browser comes back with what it left with, or is refused. An ID token counts if a key of the provider
signed it (asymmetric algorithms only), for this market, with this nonce, within its times (3.1.3.7).

What would break it: a discovery document that names another issuer, which is refused.
"""

import base64
import hashlib
import hmac
import json
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from flmarket.broker.core import Broker
from flmarket.broker.errors import Unauthenticated
from flmarket.broker.settings import Settings
from flmarket.broker.stamps import new_secret
from flmarket.errors import ConfigError, MissingDependency

COOKIE = "flmarket_oidc"
CALLBACK = "/sign-in/oidc/callback"
LASTS = 600
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_KEPT = 3600.0  # seconds for which the provider's description and keys are
_SECONDS = 10.0
_AGAIN = "Signing in took too long, or began in another window: try again."


@dataclass(frozen=True)
class Claims:
    """Whom the provider says it is; `email` only if it is verified."""

    issuer: str
    subject: str
    email: str | None


class Provider:
    """The operator's identity provider."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._found: dict[str, tuple[float, dict[str, Any]]] = {}

    @classmethod
    def of(cls, settings: Settings) -> "Provider | None":
        """The one that is set, if any; a typed error if something is missing that it needs."""
        if not settings.oidc_issuer:
            return None
        try:
            import joserfc  # noqa: F401
        except ImportError:
            raise MissingDependency("joserfc", "oidc") from None
        parts = urlsplit(settings.oidc_issuer)
        if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigError("setting oidc_issuer", settings.oidc_issuer, "an address that begins with https://")
        for name in ("public_url", "oidc_client_id"):
            if not getattr(settings, name):
                raise ConfigError(f"setting {name}", "", "something, as oidc_issuer is set")
        return cls(settings)

    def leave(self, broker: Broker, target: str) -> tuple[str, str]:
        """Where to send a browser, and the cookie that it must come back with; `target` is where it wants to go."""
        kept = {
            "state": new_secret(), "nonce": new_secret(), "verifier": new_secret(), "next": target,
            "until": int(time.time()) + LASTS,
        }  # fmt: skip
        challenge = base64.urlsafe_b64encode(hashlib.sha256(str(kept["verifier"]).encode()).digest()).rstrip(b"=")
        query = {
            "response_type": "code", "client_id": self._settings.oidc_client_id, "redirect_uri": self._back,
            "scope": "openid email profile", "state": kept["state"], "nonce": kept["nonce"],
            "code_challenge": challenge.decode(), "code_challenge_method": "S256",
        }  # fmt: skip
        endpoint = self._described()["authorization_endpoint"]
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}", _sealed(broker, kept)

    def come_back(self, broker: Broker, cookie: str, *, state: str, code: str) -> tuple[Claims, str]:
        """Who came back, and where she wants to go; Unauthenticated for anything that is not in order."""
        kept = _opened(broker, cookie)
        if kept is None or not state or not hmac.compare_digest(state.encode(), kept["state"].encode()):
            raise Unauthenticated(_AGAIN)
        form = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": self._back,
            "code_verifier": kept["verifier"],
        }  # fmt: skip
        settings = self._settings
        try:
            with httpx.Client(timeout=_SECONDS, trust_env=False) as client:
                auth = httpx.BasicAuth(settings.oidc_client_id, settings.oidc_client_secret)
                answer = client.post(self._described()["token_endpoint"], data=form, auth=auth)
                answer.raise_for_status()
                token = answer.json()["id_token"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise Unauthenticated(f"the identity provider did not vouch for you ({type(error).__name__})") from None
        return self._claims(str(token), kept["nonce"]), str(kept["next"])

    @property
    def _back(self) -> str:
        return self._settings.public_url + CALLBACK

    def _claims(self, token: str, nonce: str) -> Claims:
        from joserfc import jwt
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        settings = self._settings
        needed = jwt.JWTClaimsRegistry(
            leeway=60,
            iss={"essential": True, "value": settings.oidc_issuer},
            aud={"essential": True, "value": settings.oidc_client_id},
            nonce={"essential": True, "value": nonce},
            exp={"essential": True},
            iat={"essential": True},
            sub={"essential": True},
        )
        keys_at = self._described()["jwks_uri"]
        for fresh in (False, True):  # the provider may have changed its keys
            try:
                keys = KeySet.import_key_set(self._get(keys_at, fresh=fresh))  # type: ignore[arg-type]
                claims = jwt.decode(token, keys, algorithms=list(_ALGORITHMS)).claims
                needed.validate(claims)
            except (JoseError, ValueError, KeyError, TypeError) as error:
                problem = error
                continue
            audience = claims["aud"]
            several = isinstance(audience, list) and len(audience) > 1
            if (several or "azp" in claims) and claims.get("azp") != settings.oidc_client_id:
                raise Unauthenticated("the identity provider's word is for somebody else")
            email = claims.get("email") if claims.get("email_verified") is True else None
            return Claims(settings.oidc_issuer, str(claims["sub"])[:255], email if isinstance(email, str) else None)
        raise Unauthenticated(f"the identity provider's word does not hold ({type(problem).__name__})")

    def _described(self) -> dict[str, Any]:
        issuer = self._settings.oidc_issuer
        found = self._get(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != issuer:
            raise Unauthenticated("the identity provider calls itself something else: the operator has to look at it")
        return found

    def _get(self, url: str, *, fresh: bool = False) -> dict[str, Any]:
        with self._lock:
            known = self._found.get(url)
            if known is not None and not fresh and known[0] > time.monotonic():
                return known[1]
            try:
                answer = httpx.get(url, timeout=_SECONDS, trust_env=False)
                answer.raise_for_status()
                found = answer.json()
            except (httpx.HTTPError, ValueError):
                raise Unauthenticated("the identity provider does not answer: try again later") from None
            if not isinstance(found, dict):
                raise Unauthenticated("the identity provider does not answer as one")
            self._found[url] = (time.monotonic() + _KEPT, found)
            return found


def _sealed(broker: Broker, kept: dict[str, Any]) -> str:
    text = base64.urlsafe_b64encode(json.dumps(kept).encode()).decode()
    return f"{text}.{_seal(broker, text)}"


def _opened(broker: Broker, cookie: str) -> dict[str, Any] | None:
    text, _, seal = cookie.partition(".")
    if not text or not hmac.compare_digest(seal.encode(), _seal(broker, text).encode()):
        return None
    kept: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text))
    return kept if kept["until"] >= time.time() else None


def _seal(broker: Broker, text: str) -> str:
    return hmac.new(broker.secrets.keys, f"oidc\0{text}".encode(), hashlib.sha256).hexdigest()
