"""`flmarket audit sampling:SCHEME`: does a client sampling scheme keep what it claims?"""

from __future__ import annotations

from pathlib import Path

from flmarket.audit import SamplingAudit, audit_sampling
from flmarket.cli.audit import SAMPLING, check_page, claims_table, share_done
from flmarket.cli.output import print_json, print_path, screen, show_trust, table
from flmarket.registry import imported
from flmarket.report.audit_page import write_sampling_audit
from flmarket.trust import BIDS_ONLY

__all__ = ["run_sampling_audit"]


def run_sampling_audit(
    target: str,
    population: str | None,
    draws: int,
    clients: int | None,
    search: str,
    seed: int,
    as_json: bool,
    report_path: Path | None,
) -> None:
    """Audit, show, and write the page if asked to."""
    check_page(report_path)
    name = target.removeprefix(SAMPLING)
    scheme = imported(name, "mechanism") if ":" in name else name
    population, clients = population or "uniform-costs", 50 if clients is None else clients
    with share_done(quiet=as_json) as advance:
        found = audit_sampling(scheme, population, draws, clients=clients, search=search, seed=seed, progress=advance)
    command = f"flmarket audit {target} --population {population} --profiles {draws} --owners {clients} "
    command += f"--search {search} --seed {seed}"
    page = None if report_path is None else write_sampling_audit(found, report_path, command=command)
    if as_json:
        print_json(found.to_dict() | ({"report": str(page)} if page else {}))
        return
    _show(found)
    show_trust(BIDS_ONLY)
    if page is not None:
        print_path("\nreport", page)


def _show(found: SamplingAudit) -> None:
    screen.print(
        f"[bold]{found.scheme}[/] on {found.draws:,} draws of {found.clients} clients, {found.population}\n",
        highlight=False,
    )
    screen.print(claims_table(found.claims))
    rows = table(
        "\nA round's expected bill over its budget; budget per client as a multiple of the mean cost",
        "budget", "mean", "worst draw", "mean 1/q", "told the costs",
    )  # fmt: skip
    for row in found.spending:
        rows.add_row(
            f"{row.budget_factor:g}",
            f"{row.mean_ratio:.4f} ± {row.standard_error:.4f}",
            f"{row.worst_ratio:.4f}",
            f"{row.objective:.3g}",
            f"{row.first_best:.3g}",
        )
    screen.print(rows)
    screen.print(
        f"\n[dim]Searched: {found.reports_per_client:,} reports by each of {found.draws * found.clients:,} clients "
        f"({found.search}). Finding nothing is evidence, not proof.[/]",
        highlight=False,
    )
