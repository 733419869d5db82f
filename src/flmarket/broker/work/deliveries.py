"""The outbox is emptied: each notice is posted to its webhook or mailed, again and again until it is taken or given up.

At least once: a notice is marked as sent after its receiver took it, so one that was cut off in between is sent again,
under the same id. A hook that fails rests, ever longer; others are not held up by it.

A party names the address that is posted to, so it could name something inside the operator's own network. Every address
that a host's name stands for must be a public one, unless the operator allowed it (`webhook_allow`), and the connection
is made to the address that was looked at, not to whatever the name stands for a moment later. Redirects are not
followed, the environment's proxies are not used, and an answer is read no further than its status.
"""

import http.client
import ipaddress
import json
import smtplib
import socket
import ssl
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.message import EmailMessage
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import select, update

from flmarket import __version__
from flmarket.broker.office.notices import secret_of
from flmarket.broker.settings import Settings
from flmarket.broker.stamps import now
from flmarket.broker.tables import Hook, Notice
from flmarket.broker.work.holders import Beside
from flmarket.client.webhooks import sign
from flmarket.errors import FlmarketError
from flmarket.ledger import format_micros

_AT_ONCE = 8
_SECONDS = 10.0  # for a connection, and for each answer
_LONGEST = 30.0  # for one attempt in all, however slowly it is answered
_LONGEST_REST = 6 * 3600.0
_RELAYS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "2002::/16", "2001::/32")))  # they lead to IPv4 addresses

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class NotDelivered(FlmarketError):
    """A receiver did not take a notice, or may not be asked to."""


class Deliveries(Beside):
    """Sends what is due, several hooks at once and each of them in order. The thread lives while there is something."""

    def ensure_running(self) -> None:
        """Start the thread if something is due and it does not run."""
        if not self.is_running() and self._due():
            self.start(self.run, "notices")

    def run(self) -> int:
        """Here and now, everything that is due; returns how many attempts were made."""
        attempts = 0
        while (due := self._due()) and not self.stop.is_set():
            with ThreadPoolExecutor(_AT_ONCE, "flmarket-notice") as pool:
                for one, error in zip(due, pool.map(self._try, due), strict=True):
                    self._note(one, error)
            attempts += len(due)
        return attempts

    def _due(self) -> list[Any]:
        """Of every hook the first that is due: rows of the notice, and of whom it is for."""
        columns = (Notice.id, Notice.hook_id, Hook.kind, Hook.address, Notice.body, Notice.tries)
        wanted = Notice.state == "waiting", Notice.next_at <= now(), Hook.removed_at.is_(None)
        query = select(*columns).join(Hook).where(*wanted).order_by(Notice.at, Notice.id).limit(1000)
        found: dict[str, Any] = {}
        with self.broker.database.read() as session:
            for row in session.execute(query):
                found.setdefault(row.hook_id, row)
        return list(found.values())

    def _try(self, one: Any) -> str:
        """An attempt; returns what went wrong."""
        broker, body = self.broker, one.body.encode()
        try:
            if one.kind == "email":
                _mail(broker.settings, one.address, one.id, json.loads(body), broker.currency)
            else:
                headers = sign(secret_of(broker, one.hook_id), one.id, now() // 1000, body)
                post(one.address, body, headers, allow=broker.settings.webhook_allow)
        except NotDelivered as error:
            return str(error)
        except (OSError, http.client.HTTPException, smtplib.SMTPException, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _note(self, one: Any, error: str) -> None:
        settings, at, tries = self.broker.settings, now(), one.tries + 1
        rest = int(1000 * min(_LONGEST_REST, settings.notice_first_rest * 2 ** min(one.tries, 30)))
        state = "given up" if error and tries >= settings.notice_tries else "waiting" if error else "sent"
        values: dict[str, Any] = {"state": state, "tries": tries, "error": error[:300], "next_at": at + rest}
        with self.broker.database.write() as session:
            session.execute(update(Notice).where(Notice.id == one.id).values(**values, sent_at=None if error else at))
            if error:  # what else there is for this hook rests with it
                others = Notice.hook_id == one.hook_id, Notice.state == "waiting", Notice.next_at < at + rest
                session.execute(update(Notice).where(*others).values(next_at=at + rest))
        self.broker.metrics.notices.labels(one.kind, "failed" if error else "sent").inc()


# --- webhooks ---------------------------------------------------------------------------------------------------------


def post(url: str, body: bytes, headers: dict[str, str], *, allow: Sequence[str] = ()) -> None:
    """Post to an address that may be reached; NotDelivered unless the answer is 2xx."""
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    addresses = reachable(host, port, allow, secure=secure)
    connection = _Pinned(host, port, addresses, ssl.create_default_context() if secure else None)
    cut = threading.Timer(_LONGEST, connection.cut)
    cut.daemon = True
    cut.start()
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        agent = {"User-Agent": f"flmarket/{__version__}", "Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", path, body, agent | headers)
        status = connection.getresponse().status
    finally:
        cut.cancel()
        connection.close()
    if not 200 <= status < 300:
        raise NotDelivered(f"it answered with {status}, not with 2xx")


def reachable(host: str, port: int, allow: Sequence[str], *, secure: bool) -> list[str]:
    """The addresses that a host's name stands for, if webhooks may go there; NotDelivered otherwise."""
    found = sorted({str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    if host in allow:
        return found
    allowed = [ipaddress.ip_network(one) for one in allow if _is_network(one)]
    for text in found:
        address = ipaddress.ip_address(text.partition("%")[0])
        inside = any(address.version == one.version and address in one for one in allowed)
        if not inside and not _is_public(address):
            raise NotDelivered("it leads into a private network, which the operator has not allowed")
        if not inside and not secure:
            raise NotDelivered("https is needed outside the operator's own network")
    return found


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_public(address.ipv4_mapped)
        if any(address in relay for relay in _RELAYS):
            return False
    return address.is_global and not address.is_multicast


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


class _Pinned(http.client.HTTPConnection):
    """A connection to addresses that were looked at, with the host's name in the request and in TLS."""

    def __init__(self, host: str, port: int, addresses: Sequence[str], context: ssl.SSLContext | None) -> None:
        super().__init__(host, port, timeout=_SECONDS)
        self._addresses, self._context = addresses, context

    def connect(self) -> None:
        """To the first address that answers."""
        problem: OSError = ConnectionError("the host's name stands for no address")
        for address in self._addresses:
            try:
                plain = socket.create_connection((address, self.port), timeout=_SECONDS)
            except OSError as error:
                problem = error
                continue
            self.sock = plain if self._context is None else self._context.wrap_socket(plain, server_hostname=self.host)
            return
        raise problem

    def cut(self) -> None:
        """End it from another thread."""
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


# --- mail -------------------------------------------------------------------------------------------------------------


def _mail(settings: Settings, address: str, notice_id: str, notice: dict[str, Any], currency: str) -> None:
    if not settings.smtp_host:
        raise NotDelivered("no mail server is set (smtp_host)")
    subject, text = words(notice["event"], notice["data"], currency)
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = subject, settings.mail_from, address
    message["Message-ID"] = f"<{notice_id}@flmarket>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(f"{text}\n\n{notice['at']}, {notice_id}\n")
    context = ssl.create_default_context()
    tls = settings.smtp_security == "tls"
    server = (
        smtplib.SMTP_SSL(settings.smtp_host, settings.smtp_port, timeout=_SECONDS, context=context)
        if tls
        else smtplib.SMTP(settings.smtp_host, settings.smtp_port, timeout=_SECONDS)
    )
    with server:
        if settings.smtp_security == "starttls":
            server.starttls(context=context)
        if settings.smtp_user:
            server.login(settings.smtp_user, settings.smtp_password)
        server.send_message(message)


def words(event: str, data: dict[str, Any], currency: str) -> tuple[str, str]:
    """A notice as people read it: subject and text."""

    def money(name: str) -> str:
        return f"{format_micros(data[name])} {currency}"

    if event == "cap":
        told = f"{data['spent_epsilon_total']:.4g} of {data['cap_epsilon_total']:.4g}"
        return (
            "Your privacy cap is nearly used",
            f"You have given up ε = {told} in total. Nothing is sold beyond your cap; raise it only if you mean to.",
        )
    if event in ("award", "payment"):
        task = f"“{data['task_name']}”, round {data['round'] + 1}"
        if event == "award":
            return f"You won in {task}", f"{money('price_micros')} are in escrow for your update ({data['award_id']})."
        return f"You were paid for {task}", f"{money('price_micros')} are in your account ({data['award_id']})."
    if event.startswith("dispute."):
        what = f"{money('price_micros')} for round {data['round'] + 1} of task {data['task_id']} ({data['award_id']})."
        if event == "dispute.opened":
            return ("An award is disputed", f"{what} The {data['opened_by']} does not agree; the operator decides.")
        whose = "owner" if data["decision"] == "pay" else "buyer"
        credit = " The operator credited it from her own money." if data["credited_micros"] else ""
        return "A dispute is decided", f"{what} Decided for the {whose}.{credit} {data['note']}"
    if event == "payout":
        return "A payout was sent to you", f"{money('amount_micros')}, {data['payout_id']} {data['reference']}".strip()
    if event in ("task.ended", "task.failed"):
        name, state = data["task_name"], data["state"]
        text = f"After {data['rounds_done']} of {data['rounds']} rounds."
        if "refunded_micros" in data:
            text += f" Paid to owners: {money('spent_micros')}. Returned to you: {money('refunded_micros')}."
        return (
            f"“{name}” {'has ' if state != 'cancelled' else 'was '}{state}",
            f"{text} {data.get('error', '')}".strip(),
        )
    return "A test", "This is what the market's notices look like."
