"""Papers to print and to file: an owner's statement and a buyer's invoice as PDF (extra `pdf`).

Every amount is exact and in the market's currency, and what was paid adds up to the sum below it, to the micro-unit:
the figures are those of `statements` and `tasks`, which are compared with the ledger. Texts are other people's: signs
that nobody sees, some of which turn the text around them (U+202E), are left out, and what the font has no sign for
becomes a box. The font is DejaVu Sans, from matplotlib.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flmarket.broker.core import Broker, Party
from flmarket.broker.office.statements import AWARD_WORDS, statement
from flmarket.broker.office.tasks import bill, bill_lines, get_task
from flmarket.broker.requests import without_invisible
from flmarket.broker.stamps import iso, now
from flmarket.broker.tables import PartyRow
from flmarket.errors import MissingDependency
from flmarket.ledger import format_micros
from flmarket.report.formatting import count, epsilon

if TYPE_CHECKING:
    from fpdf import FPDF

PRINTED = 1000  # awards on one statement; earlier ones are one line of it
_FONT = "DejaVu"
_MISSING = "\u25a1"
_SMALL, _LINE = 8, 4.6


def statement_pdf(broker: Broker, party: Party) -> bytes:
    """What an owner sold and earned: her latest awards one by one, those before in one line."""
    known = statement(broker, party, limit=PRINTED, newest=True)
    shown = known.releases[::-1]
    paid, spent = sum(one.paid_micros for one in shown), known.privacy.spent_epsilon_total
    rows = [
        (
            _day(one.at).removesuffix(" UTC"), one.task_name, f"{one.index + 1}", epsilon(one.epsilon),
            epsilon(one.epsilon_total), AWARD_WORDS.get(one.state, one.state), format_micros(one.price_micros),
            format_micros(one.paid_micros),
        )
        for one in shown
    ]  # fmt: skip
    if known.awards > len(shown):
        earlier = f"{known.awards - len(shown):,} awards before these"
        rows.insert(0, ("", earlier, "", "", "", "", "", format_micros(known.earned_micros - paid)))
    paper = _paper(broker, "Statement")
    assert known.reputation is not None
    _facts(
        paper,
        [
            ("Owner", known.party.name), ("Id", known.party.id), ("As of", _day(iso(now()))),
            ("Awards", f"{known.awards:,}"), ("Delivered and paid", f"{known.deliveries:,}"),
            ("Reliability", known.reputation.words),
            ("ε spent, total", f"{epsilon(spent)} of {epsilon(known.privacy.cap_epsilon_total)}"),
        ],
    )  # fmt: skip
    header = ("When, UTC", "Task", "Round", "ε round", "ε total", "State", "Awarded", "Paid")
    totals = [("Earned, total", known.earned_micros)]
    if known.credited_micros:
        totals.append(("Credited by the operator after disputes", known.credited_micros))
    _table(paper, header, rows, (33, 44, 14, 15, 15, 23, 22, 24), numbers=(2, 3, 4, 6, 7), totals=totals)
    _words(paper, f"Amounts in {broker.currency}, exact. {known.privacy.words}")
    return bytes(paper.output())


def invoice_pdf(broker: Broker, party: Party, task_id: str) -> bytes:
    """What a task cost, round by round, and where the rest of its deposit is."""
    task, found = get_task(broker, party, task_id), bill(broker, party, task_id)
    with broker.database.read() as session:
        buyer = session.get_one(PartyRow, task.buyer_id)
    paper = _paper(broker, "Invoice" if task.ended else "Bill so far")
    ended = [("Ended", _day(task.finished_at))] if task.finished_at else []
    _facts(
        paper,
        [
            ("Buyer", buyer.name), ("Id", buyer.id), ("Task", task.name), ("Number", task.id), ("State", task.state),
            ("Posted", _day(task.created_at)), *ended, ("As of", _day(iso(now()))),
            ("Rounds", f"{task.rounds_done:,} of {task.rounds:,}"),
        ],
    )  # fmt: skip
    lines = [(what, updates, format_micros(micros)) for what, updates, micros in bill_lines(found)]
    updates = sum(one.deliveries for one in found.lines)
    totals = [("Deposit", found.escrow_micros)]
    if found.credited_micros:
        totals.append(("Credited by the operator after disputes, beside the deposit", found.credited_micros))
    _table(paper, ("What", "Updates", "Amount"), lines, (110, 30, 50), numbers=(1, 2), totals=totals)
    _words(
        paper,
        f"To pay: {format_micros(found.spent_micros)} for {count(updates, 'update')}, taken from the deposit. "
        f"Amounts in {broker.currency}, exact; the lines add up to the deposit.",
    )
    return bytes(paper.output())


def _day(moment: str | None) -> str:
    at = datetime.fromisoformat(moment or "").astimezone(UTC)
    return f"{at.day} {at:%b %Y, %H:%M} UTC"


# --- drawing ----------------------------------------------------------------------------------------------------------


def _paper(broker: Broker, title: str) -> "FPDF":
    """A page with its title; the others follow as they are needed, each with its number."""
    try:
        from fpdf import FPDF
    except ImportError:
        raise MissingDependency("fpdf2", "pdf") from None

    class Paper(FPDF):
        def footer(self) -> None:
            self.set_y(-12)
            self.set_font(_FONT, size=_SMALL)
            self.cell(0, _LINE, f"{title}, page {self.page_no()} of {{nb}}", align="R")

    paper = Paper(format="A4")
    regular, bold, _ = _font()
    paper.add_font(_FONT, fname=regular)
    paper.add_font(_FONT, style="B", fname=bold)
    paper.set_auto_page_break(True, margin=16)
    paper.set_title(title)
    paper.add_page()
    paper.set_font(_FONT, style="B", size=16)
    paper.cell(0, 10, title, new_x="LMARGIN", new_y="NEXT")
    paper.ln(2)
    return paper


@cache
def _font() -> tuple[Path, Path, frozenset[int]]:
    """The font's two files, and the signs that it has."""
    import matplotlib
    from fontTools.ttLib import TTFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    with TTFont(folder / "DejaVuSans.ttf", lazy=True) as font:
        known = frozenset(font.getBestCmap())
    return folder / "DejaVuSans.ttf", folder / "DejaVuSans-Bold.ttf", known


def _printable(text: str) -> str:
    known = _font()[2]
    plain = without_invisible(" ".join(text.split()))
    return "".join(sign if ord(sign) in known else _MISSING for sign in plain)


def _facts(paper: "FPDF", facts: Sequence[tuple[str, str]]) -> None:
    for name, text in facts:
        paper.set_font(_FONT, style="B", size=9)
        paper.cell(45, 5, name)
        paper.set_font(_FONT, size=9)
        paper.multi_cell(0, 5, _printable(text), new_x="LMARGIN", new_y="NEXT", align="L")
    paper.ln(3)


def _table(
    paper: "FPDF",
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[float],
    *,
    numbers: Sequence[int],
    totals: Sequence[tuple[str, int]],
) -> None:
    """A row that is too long for its line goes on in the next; the header stands on every page."""

    def line(cells: Sequence[str], *, bold: bool = False) -> None:
        paper.set_font(_FONT, style="B" if bold else "", size=_SMALL)
        parts = [_parts(paper, text, width) for text, width in zip(cells, widths, strict=True)]
        height = _LINE * max(map(len, parts))
        if paper.will_page_break(height):
            paper.add_page()
            if not bold:
                line(header, bold=True)
                paper.set_font(_FONT, size=_SMALL)
        left, top = paper.get_x(), paper.get_y()
        for k, (texts, width) in enumerate(zip(parts, widths, strict=True)):
            for step, text in enumerate(texts):
                paper.set_xy(left, top + step * _LINE)
                paper.cell(width, _LINE, text, align="R" if k in numbers else "L")
            left += width
        paper.set_xy(paper.l_margin, top + height)

    line(header, bold=True)
    for cells in rows:
        line([_printable(text) for text in cells])
    paper.ln(1)
    paper.set_font(_FONT, style="B", size=9)
    for name, micros in totals:
        paper.cell(sum(widths) - 50, 6, name, border="T")
        paper.cell(50, 6, format_micros(micros), border="T", align="R", new_x="LMARGIN", new_y="NEXT")


def _parts(paper: "FPDF", text: str, width: float) -> list[str]:
    """A text in lines that fit, broken anywhere if it must be."""
    room, parts, rest = width - 2 * paper.c_margin, list[str](), text
    while paper.get_string_width(rest) > room and len(rest) > 1:
        size = next(k for k in range(len(rest), 0, -1) if k == 1 or paper.get_string_width(rest[:k]) <= room)
        blank = rest.rfind(" ", 0, size + 1)
        cut = blank if blank > 0 else size
        parts.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return [*parts, rest]


def _words(paper: "FPDF", text: str) -> None:
    paper.ln(3)
    paper.set_font(_FONT, size=9)
    paper.multi_cell(0, 5, _printable(text), new_x="LMARGIN", new_y="NEXT", align="L")
