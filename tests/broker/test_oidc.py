"""People of an organisation sign in with a real OpenID Connect provider, and may do what their rights say."""

import base64
import contextlib
import hashlib
import hmac
import json
import re
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.errors import Conflict, Unauthenticated
from flmarket.broker.office import operator, parties, sessions, users
from flmarket.broker.requests import RightsRequest, UserRequest
from flmarket.broker.settings import Settings
from flmarket.broker.web import oidc
from flmarket.errors import ConfigError

PUBLIC = "http://market.test"


@pytest.fixture(scope="module")
def provider():
    """The provider's address; a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "--port", str(port), "--require-nonce"]
    process = subprocess.Popen(command, **options)
    address = f"http://localhost:{port}"
    for _ in range(600):
        assert process.poll() is None, "the provider did not start"
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{address}/.well-known/openid-configuration", verify=False)
            break
        time.sleep(0.05)
    yield address
    process.terminate()
    process.wait()


def person(provider, sub, **claims):
    assert httpx.put(f"{provider}/users/{sub}", json=claims, verify=False).status_code < 300


@pytest.fixture
def market(tmp_path, provider, serve):
    """A broker with single sign-on, served."""
    settings = {"oidc_issuer": provider, "oidc_client_id": "market", "oidc_client_secret": "s", "oidc_name": "the lab"}
    url = f"sqlite:///{tmp_path}/b.db"
    broker = Broker.open(Settings(database_url=url, run_worker=False, public_url=PUBLIC, **settings))
    with serve(create_app(broker=broker)) as address:
        yield broker, address
    broker.close()


@contextlib.contextmanager
def browser(address):
    with httpx.Client(base_url=address, timeout=30, verify=False) as client:
        yield client


def go(client, sub, next_page="/account"):
    """To the provider, where `sub` agrees, and to the address that it sends her back to (which stands for `client`)."""
    away = client.get(f"/sign-in/oidc?next={next_page}")
    assert away.status_code == 303, away.text
    agreed = httpx.post(away.headers["location"], data={"sub": sub}, verify=False)
    assert agreed.status_code in (302, 303), agreed.text
    back = urlsplit(agreed.headers["location"])
    assert f"{back.scheme}://{back.netloc}{back.path}" == PUBLIC + oidc.CALLBACK
    return f"{back.path}?{back.query}"


def enter(client, sub):
    answer = client.get(go(client, sub))
    assert answer.status_code == 303, answer.text
    return answer


def token_of(page):
    return re.search(r'name="csrf_token" value="([^"]+)"', page.text).group(1)


def test_people_come_in_act_and_are_shut_out(market, provider, joined):
    broker, address = market
    clinic = joined(broker, "owner", "Clinic").party
    for sub in ("anna", "bert", "cleo"):
        person(provider, sub, email=f"{sub}@clinic.test", email_verified=True)
    desk = joined(broker, "operator", "Desk").party
    users.add_user(broker, desk, clinic.id, UserRequest(name="Anna", email="Anna@clinic.test", rights="admin"))
    with browser(address) as anna, browser(address) as bert:
        assert "Sign in with the lab" in anna.get("/sign-in").text
        assert enter(anna, "anna").headers["location"] == "/account"
        page = anna.get("/account")
        assert "Anna, Clinic (owner)" in page.text
        form = {"csrf_token": token_of(page), "person": "Bert", "email": "bert@clinic.test", "rights": "viewer"}
        assert anna.post("/account/users", data=form).status_code == 303
        enter(bert, "bert")
        looks = bert.get("/account")
        assert "You may look, not act." in looks.text
        cap = {"csrf_token": token_of(looks), "cap": "5"}
        assert bert.post("/owner/cap", data=cap).status_code == 403
        token = bert.get("/account").text
        csrf = {"X-CSRF-Token": re.search(r'X-CSRF-Token": "([^"]+)"', token).group(1)}
        api = "/api/v1"
        assert bert.get(f"{api}/me/privacy").status_code == 200
        assert bert.put(f"{api}/me/privacy", json={"cap_epsilon_total": 5.0}, headers=csrf).status_code == 403
        his = next(one for one in users.list_users(broker, clinic).items if one.name == "Bert")
        users.set_rights(broker, clinic, his.id, RightsRequest(rights="member"))  # holds from his next click on
        assert bert.put(f"{api}/me/privacy", json={"cap_epsilon_total": 5.0}, headers=csrf).status_code == 200
        assert bert.post(f"{api}/me/keys", json={}, headers=csrf).status_code == 403
        assert bert.post(f"{api}/me/users", json=form, headers=csrf).status_code in (403, 422)
        assert bert.post(f"{api}/me/hooks", json={"address": "https://example.org/"}, headers=csrf).status_code == 403
        # he sees his own session, she all of them
        assert [one["user"] for one in bert.get(f"{api}/me/sessions").json()["items"]] == ["Bert"]
        seen = anna.get(f"{api}/me/sessions").json()["items"]
        assert sorted(one["user"] for one in seen) == ["Anna", "Bert"]
        line = next(one for one in operator.audit_log(broker, desk).items if one.action == "cap.set")
        assert (line.party, line.person) == ("Clinic", "Bert")
        assert operator.audit_log(broker, desk, about="Bert").items
        other = next(one["id"] for one in seen if one["user"] == "Anna")
        assert bert.delete(f"{api}/me/sessions/{other}", headers=csrf).status_code == 404
        end = f"/account/sessions/{next(one['id'] for one in seen if one['user'] == 'Bert')}/end"
        assert anna.post(end, data=form).status_code == 303
        assert bert.get(f"{api}/me").status_code == 401
        enter(bert, "bert")
        assert anna.post(f"/account/users/{his.id}/end", data=form).status_code == 303
        assert bert.get(f"{api}/me").status_code == 401, "removed, and signed out"
        assert bert.get(go(bert, "bert")).status_code == 401, "nor does he come back"
        hers = next(one for one in users.list_users(broker, clinic).items if one.name == "Anna")
        herself = sessions.session_of(broker, anna.cookies["flmarket_session"])[0]
        with pytest.raises(Conflict, match="yourself"):
            users.remove_user(broker, herself, hers.id)


def test_who_is_not_entered_stays_outside(market, provider, joined):
    broker, address = market
    clinic = joined(broker, "owner", "Clinic").party
    users.add_user(broker, clinic, clinic.id, UserRequest(name="Dora", email="dora@clinic.test"))
    with pytest.raises(Conflict, match="already"):
        users.add_user(broker, clinic, clinic.id, UserRequest(name="Dora", email="DORA@clinic.test"))
    person(provider, "stranger", email="x@elsewhere.test", email_verified=True)
    person(provider, "liar", email="dora@clinic.test", email_verified=False)
    person(provider, "dora", email="dora@clinic.test", email_verified=True)
    with browser(address) as client:
        for sub in ("stranger", "liar"):
            answer = client.get(go(client, sub))
            assert answer.status_code == 401
            assert "Nobody entered you here" in answer.text
        enter(client, "dora")
    # from now on she is known by what the provider calls her: another account with her address is somebody else
    person(provider, "heir", email="dora@clinic.test", email_verified=True)
    with browser(address) as client:
        assert client.get(go(client, "heir")).status_code == 401
    parties.set_active(broker, joined(broker, "operator").party, clinic.id, active=False)
    with browser(address) as client:
        assert client.get(go(client, "dora")).status_code == 401


def test_a_code_is_good_where_it_was_asked_for_and_once(market, provider, joined):
    broker, address = market
    clinic = joined(broker, "owner", "Clinic").party
    users.add_user(broker, clinic, clinic.id, UserRequest(name="Emil", email="emil@clinic.test"))
    person(provider, "emil", email="emil@clinic.test", email_verified=True)
    with browser(address) as client, browser(address) as victim:
        back = go(client, "emil")
        assert victim.get(back).status_code == 401, "no cookie: it began in another browser"
        victim.get("/sign-in/oidc")
        assert victim.get(back).status_code == 401, "another state"
        forged = client.cookies["flmarket_oidc"]
        text, _, seal = forged.partition(".")
        kept = json.loads(base64.urlsafe_b64decode(text)) | {"next": "https://evil.test/"}
        lie = base64.urlsafe_b64encode(json.dumps(kept).encode()).decode()
        with browser(address) as other:
            other.cookies.set("flmarket_oidc", f"{lie}.{seal}", path="/sign-in")
            assert other.get(back).status_code == 401
        assert client.get(back).status_code == 303
        client.cookies.set("flmarket_oidc", forged, path="/sign-in")
        assert client.get(back).status_code == 401, "the provider takes a code once"
        assert client.get("/sign-in/oidc?next=//evil.test").status_code == 303


def settings_for(issuer="http://127.0.0.1:9", **more):
    return Settings(oidc_issuer=issuer, oidc_client_id="market", public_url=PUBLIC, **more)


@pytest.fixture(scope="module")
def key():
    return RSAKey.generate_key(2048, parameters={"kid": "one"}, private=True)


def claims(**changes):
    at = int(time.time())
    return {
        "iss": "http://127.0.0.1:9", "aud": "market", "sub": "anna", "nonce": "n", "iat": at, "exp": at + 60,
        "email": "a@b.test", "email_verified": True,
    } | changes  # fmt: skip


CHEATS = {
    "another issuer": {"iss": "http://127.0.0.1:8"},
    "another market": {"aud": "other"},
    "another nonce": {"nonce": "m"},
    "too old": {"exp": 1},
    "no subject": {"sub": None},
    "for several, by another": {"aud": ["market", "other"], "azp": "other"},
    "for several, by nobody": {"aud": ["market", "other"]},
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_tokens_that_do_not_hold(cheat, key, monkeypatch):
    made = provider_with(key, monkeypatch)
    given = {name: value for name, value in claims(**CHEATS[cheat]).items() if value is not None}
    with pytest.raises(Unauthenticated):
        made._claims(jwt.encode({"alg": "RS256", "kid": "one"}, given, key), "n")


def provider_with(key, monkeypatch):
    made = oidc.Provider.of(settings_for())
    answers = {"jwks": {"keys": [key.as_dict(private=False)]}}
    described = {"issuer": "http://127.0.0.1:9", "jwks_uri": "jwks"}
    monkeypatch.setattr(made, "_get", lambda url, fresh=False: answers.get(url, described))
    return made


def test_tokens_that_others_signed(key, monkeypatch):
    made = provider_with(key, monkeypatch)
    good = jwt.encode({"alg": "RS256", "kid": "one"}, claims(), key)
    assert made._claims(good, "n") == oidc.Claims("http://127.0.0.1:9", "anna", "a@b.test")
    unverified = jwt.encode({"alg": "RS256", "kid": "one"}, claims(email_verified="true"), key)
    assert made._claims(unverified, "n").email is None
    head, body, signature = good.split(".")
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
    other = RSAKey.generate_key(2048, parameters={"kid": "one"}, private=True)
    # the public key as if it were a shared secret
    content = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"one"}').rstrip(b"=").decode() + "." + body
    mac = hmac.new(key.as_pem(private=False), content.encode(), hashlib.sha256).digest()
    shared = f"{content}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
    for bad in (
        jwt.encode({"alg": "RS256", "kid": "one"}, claims(), other), f"{none}.{body}.", f"{head}.{body}.AAAA", shared,
        f"{head}.{body[:-2]}AA.{signature}", "no token",
    ):  # fmt: skip
        with pytest.raises(Unauthenticated):
            made._claims(bad, "n")


def test_settings_that_cannot_work():
    assert oidc.Provider.of(Settings()) is None
    with pytest.raises(ConfigError, match="https"):
        oidc.Provider.of(settings_for("http://login.example.org"))
    with pytest.raises(ConfigError, match="public_url"):
        oidc.Provider.of(Settings(oidc_issuer="https://login.example.org", oidc_client_id="x"))
