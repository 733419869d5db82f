"""Payouts as one file for the operator's bank: ISO 20022, customer credit transfer initiation (pain.001.001.09).

It holds what is booked and not sent yet, of parties whose account (IBAN) is known, in whole cents; what is left out is
listed with the reason. The message's id follows from the payouts in it, so a bank that is given the same file twice can
tell. Making the file moves nothing: the operator says what was sent. What would break it: an operator who sends a
payout by hand and by file, and notes neither.

Element names and their order: ISO 20022 message definition pain.001.001.09; for euros the file is marked as SEPA (EPC
rulebook of credit transfers), which asks for the charge bearer SLEV and allows a bank without a BIC.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree

from sqlalchemy import select

from flmarket.broker.core import Broker, Party, require, require_admin
from flmarket.broker.errors import Conflict
from flmarket.broker.office.operator import note
from flmarket.broker.requests import without_invisible
from flmarket.broker.stamps import iso, now
from flmarket.broker.tables import PartyRow, PayoutRow, as_wire, row_of
from flmarket.client import wire
from flmarket.errors import InvalidInput
from flmarket.ledger import MICROS

NAMESPACE = "urn:iso:std:iso:20022:tech:xsd:pain.001.001.09"
_CENT = MICROS // 100
_MOST = 5_000  # in one file
_IBAN = re.compile(r"[A-Z]{2}[0-9]{2}[A-Z0-9]{11,30}")
# what banks take in names and references (EPC217-08), everything else becomes a blank
_FOREIGN = re.compile(r"[^A-Za-z0-9/\-?:().,'+ À-ÿ]")


@dataclass(frozen=True)
class Transfers:
    """What can be sent now; and what cannot, with the reason in words."""

    ready: tuple[wire.Payout, ...]
    left_out: tuple[tuple[wire.Payout, str], ...]
    problem: str = ""  # why there can be no file at all


def checked_iban(text: str) -> str:
    """An IBAN without blanks whose check digits are right (ISO 7064, mod 97); a typed error otherwise."""
    found = re.sub(r"\s", "", text).upper()
    if not _IBAN.fullmatch(found):
        raise InvalidInput("iban", text[:40], "an IBAN such as DE89 3704 0044 0532 0130 00")
    digits = "".join(str(int(sign, 36)) for sign in found[4:] + found[:4])
    if int(digits) % 97 != 1:
        raise InvalidInput("iban", text[:40], "an IBAN whose check digits are right: look for a slip of the pen")
    return found


def set_iban(broker: Broker, party: Party, party_id: str, iban: str) -> wire.Party:
    """Where a party's payouts go: hers to say, or the operator's; nowhere if it is empty. The log has its end only."""
    require_admin(party, of=party_id)
    found = checked_iban(iban) if iban.strip() else None
    with broker.database.write() as session:
        row = row_of(session, PartyRow, party_id, "party")
        if row.iban != found:
            row.iban = found
            note(session, party, "bank.set", party_id, detail=f"ends with {found[-4:]}" if found else "none")
    return as_wire(wire.Party, row)


def transfers(broker: Broker, party: Party) -> Transfers:
    """The operator's: payouts that are still to be sent."""
    require(party, "operator")
    query = (
        select(PayoutRow, PartyRow)
        .join(PartyRow)
        .where(PayoutRow.state.in_(("booked", "failed")))
        .order_by(PayoutRow.created_at, PayoutRow.id)
        .limit(_MOST)
    )
    ready, left_out = [], []
    with broker.database.read() as session:
        for row, who in session.execute(query):
            one = as_wire(wire.Payout, row, name=who.name, role=who.role, currency=broker.currency, iban=who.iban)
            if who.iban is None:
                left_out.append((one, "no account is known"))
            elif row.amount_micros % _CENT:
                left_out.append((one, "it is not a whole number of cents"))
            else:
                ready.append(one)
    problem = ""
    if not re.fullmatch("[A-Z]{3}", broker.currency):
        problem = "This market has no currency that banks know (setting currency, e.g. EUR)."
    elif not broker.settings.payout_iban:
        problem = "The account that payouts come from is not set (setting payout_iban)."
    return Transfers(tuple(ready), tuple(left_out), problem)


def transfer_file(broker: Broker, party: Party) -> str:
    """Payouts that are still to be sent, as a file for the bank (ISO 20022, pain.001.001.09); Conflict, in words, if
    there can be none."""
    found = transfers(broker, party)
    if found.problem or not found.ready:
        raise Conflict(found.problem or "no payout can be sent now")
    with broker.database.write() as session:
        note(session, party, "payout.file", party.id, detail=f"{len(found.ready)} payouts")
    return _document(broker, party, found.ready)


def _document(broker: Broker, party: Party, ready: tuple[wire.Payout, ...]) -> str:
    settings, at, total = broker.settings, iso(now()) or "", sum(one.amount_micros for one in ready)
    ElementTree.register_namespace("", NAMESPACE)
    root = ElementTree.Element(f"{{{NAMESPACE}}}Document")
    message = _put(root, "CstmrCdtTrfInitn")
    name = _clean(settings.payout_name or party.name, 70)
    counted = (("NbOfTxs", str(len(ready))), ("CtrlSum", _amount(total)))
    identifier = message_id(ready)
    header = _put(message, "GrpHdr")
    for tag, text in (("MsgId", identifier), ("CreDtTm", at), *counted):
        _put(header, tag, text)
    _put(header, "InitgPty/Nm", name)
    payment = _put(message, "PmtInf")
    for tag, text in (("PmtInfId", identifier), ("PmtMtd", "TRF"), *counted):
        _put(payment, tag, text)
    if broker.currency == "EUR":
        _put(payment, "PmtTpInf/SvcLvl/Cd", "SEPA")
    _put(payment, "ReqdExctnDt/Dt", at[:10])
    _put(payment, "Dbtr/Nm", name)
    _put(payment, "DbtrAcct/Id/IBAN", checked_iban(settings.payout_iban))
    bank = ("BICFI", settings.payout_bic) if settings.payout_bic else ("Othr/Id", "NOTPROVIDED")
    _put(payment, f"DbtrAgt/FinInstnId/{bank[0]}", bank[1])
    _put(payment, "ChrgBr", "SLEV")
    for one in ready:
        transfer = _put(payment, "CdtTrfTxInf")
        _put(transfer, "PmtId/EndToEndId", one.id[:35])
        _put(transfer, "Amt/InstdAmt", _amount(one.amount_micros)).set("Ccy", broker.currency)
        _put(transfer, "Cdtr/Nm", _clean(one.name, 70))
        _put(transfer, "CdtrAcct/Id/IBAN", one.iban or "")
        if reference := _clean(one.reference, 140, empty=""):
            _put(transfer, "RmtInf/Ustrd", reference)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False, short_empty_elements=False)


def message_id(payouts: Iterable[wire.Payout]) -> str:
    """What a bank knows the file by: the same for the same payouts."""
    return hashlib.sha256(" ".join(sorted(one.id for one in payouts)).encode()).hexdigest()[:32]


def _put(parent: ElementTree.Element, path: str, text: str | None = None) -> ElementTree.Element:
    for tag in path.split("/"):
        parent = ElementTree.SubElement(parent, f"{{{NAMESPACE}}}{tag}")
    parent.text = text
    return parent


def _amount(micros: int) -> str:
    return f"{micros // MICROS}.{micros % MICROS // _CENT:02d}"


def _clean(text: str, most: int, empty: str = "not named") -> str:
    return " ".join(_FOREIGN.sub(" ", without_invisible(text)).split())[:most].strip() or empty
