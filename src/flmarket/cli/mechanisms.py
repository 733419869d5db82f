"""`flmarket mechanisms`: what there is, and what each promises."""

from dataclasses import asdict

from flmarket import aggregation, auctions, learning, populations, privacy
from flmarket.aggregation import robust
from flmarket.auctions import learned
from flmarket.bids import Guarantee
from flmarket.cli.output import print_json, screen, table
from flmarket.learning import adversaries

_MARK = {
    Guarantee.EXACT: "[green]exact[/]",
    Guarantee.APPROXIMATE: "[yellow]approximate[/]",
    Guarantee.NONE: "[red]no[/]",
}


def list_mechanisms(as_json: bool) -> None:
    """Print every registered name."""
    others = {
        "aggregations": list(aggregation.names()),
        "robust_aggregations": list(robust.names()),
        "adversaries": list(adversaries.names()),
        "perturbations": list(privacy.names()),
        "populations": list(populations.names()),
        "models": list(learning.models.names()),
        "data_sets": list(learning.names()),
    }
    # the papers' networks that have weights serve ten owners, and are not listed where any number may bid
    papers = [name for name, population in learned.PAPERS.items() if population in learned.weight_names(name)]
    promises = {name: auctions.get(name).guarantees for name in (*auctions.names(), *papers)}
    if as_json:
        print_json(
            {
                "auctions": [
                    {"name": name, **asdict(promise), "about": auctions.about(name)}
                    for name, promise in promises.items()
                ],
                **others,
            }
        )
        return
    listing = table("Auctions", "name", "truthful", "rational", "within budget", "source and assumption", text=5)
    for name, promise in promises.items():
        note = promise.source + (f" · assumes {promise.assumes}" if promise.assumes else "")
        marks = (_MARK[level] for level in (promise.truthful, promise.rational, promise.budget_feasible))
        listing.add_row(name, *marks, note)
    screen.print(listing)
    for title, names in others.items():
        screen.print(f"\n[bold]{title.replace('_', ' ').capitalize()}[/]  {', '.join(names)}")
