"""The page of an audit says what the report says, to somebody who has never seen the code."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flmarket import EXACT, BidProfile, Guarantees, Outcome, auctions
from flmarket.audit import STRENGTHS, AuditReport, audit
from flmarket.report.audit_page import write_audit

from .conftest import HOSTILE, Page


class PayAsBid:
    name = HOSTILE
    guarantees = Guarantees(EXACT, EXACT, EXACT, HOSTILE, HOSTILE)

    def run(self, bids: BidProfile, budget: object, *, rng: object = None) -> Outcome:
        honest = auctions.get("m1").run(bids, budget)  # type: ignore[arg-type]
        return Outcome(honest.epsilon, np.where(honest.winners, bids.full_cost, 0.0))


@pytest.fixture(scope="module")
def lying() -> AuditReport:
    return audit("all-in", "flm21-high", profiles=60, owners=8, private=["value"])


@pytest.fixture(scope="module")
def sound() -> AuditReport:
    return audit("m1", "jdp", profiles=10, owners=5, search=replace(STRENGTHS["quick"], efficiency_profiles=0))


def test_page_needs_nothing_else_and_tells_the_story(lying: AuditReport, tmp_path: Path) -> None:
    path = write_audit(lying, tmp_path / "deep" / "audit.html", command="flmarket audit all-in --seed 1")
    assert [p.name for p in path.parent.iterdir()] == ["audit.html"]
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//cdn|@import|url\((?!#)", source)
    page = Page(source)
    assert page.tags.count("svg") == 1
    worst, text = lying.worst, page.text
    assert worst.gain > 0
    assert f"Owner {worst.owner + 1} of 8 holds" in text
    assert f"{worst.lying.payment:.4g}"[:3] in text
    assert "more than by telling the truth" in text
    assert "The most profitable lie" in text
    assert "It does not claim that nobody gains by lying" in text
    for claim in lying.claims:
        assert claim.evidence in text
    assert f"{lying.truthful.search.misreports:,} lies in all" in text
    assert "flmarket audit all-in --seed 1" in text


def test_a_sound_mechanism_is_shown_as_such(sound: AuditReport, tmp_path: Path) -> None:
    text = Page(write_audit(sound, tmp_path / "a.html").read_text()).text
    assert "Every claim it makes survived" in text
    assert "What lying does to one owner" in text
    assert "she did no better than that" in text
    assert "What the buyer gets" not in text  # not measured here
    assert "✗" not in text
    assert "for each owner." in text
    log = replace(sound.truthful.search, by_menu=750)
    menus = replace(sound, truthful=replace(sound.truthful, search=log))
    text = Page(write_audit(menus, tmp_path / "b.html").read_text()).text
    assert "for each of 50 owners; for the 750 others the best item of the menu" in text
    assert "for each owner." not in text


def test_a_contradicted_claim_is_loud_and_hostile_text_is_escaped(tmp_path: Path) -> None:
    quick = replace(STRENGTHS["quick"], efficiency_profiles=0)
    report = audit(PayAsBid(), "jdp", profiles=10, owners=5, search=quick, private=["value"])  # type: ignore[arg-type]
    page = Page(write_audit(report, tmp_path / "a.html", command=HOSTILE).read_text())
    assert "script" not in page.tags
    assert HOSTILE in page.text
    assert "Contradicted: Nobody gains by lying" in page.text
    assert "1 claim did not survive" in page.text


def test_every_epsilon_says_per_round(lying: AuditReport, tmp_path: Path) -> None:
    text = Page(write_audit(lying, tmp_path / "a.html").read_text()).text
    for match in re.finditer("ε", text):
        near = text[max(0, match.start() - 60) : match.end() + 60]
        assert re.search(r"this round|per round", near), near


def test_same_report_same_bytes(sound: AuditReport, tmp_path: Path) -> None:
    one, two = (write_audit(sound, tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert one == two


@pytest.mark.parametrize("private", [["privacy_budget"], ["data_size"], ["value", "privacy_budget", "data_size"]])
def test_every_kind_of_lie_can_be_drawn(private: list[str], tmp_path: Path) -> None:
    quick = replace(STRENGTHS["quick"], efficiency_profiles=0)
    report = audit("m2", "flm22-iid", profiles=5, owners=5, search=quick, private=private)
    assert report.worst.gain > 0
    Page(write_audit(report, tmp_path / "a.html").read_text())
