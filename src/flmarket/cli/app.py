"""The commands and their options; each does its work in a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flmarket import __version__

app = typer.Typer(
    name="flmarket",
    help="Markets in federated learning: auctions, private updates, aggregation and exact payments.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Seed = Annotated[int, typer.Option(min=0, help="Everything random follows from it.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data sets lie; else FLMARKET_DATA, the cache, then a download.")
]


def _version(value: bool) -> None:
    if value:
        print(f"flmarket {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Markets in federated learning: auctions, private updates, aggregation and exact payments."""


@app.command(epilog="Example: `flmarket demo --out out/demo` and open `out/demo/report.html`.")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.html and summary.json.")] = Path("out/demo"),
    rounds: Annotated[int | None, typer.Option(min=1, help="How many rounds to play.")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Hospitals sell private updates for a diagnosis model: a whole market on bundled data, in seconds."""
    from flmarket.cli.markets import run_demo

    run_demo(out, rounds, seed, json)


@app.command(epilog="Example: `flmarket run market.toml --out out/run --data-dir ~/data`.")
def run(
    market: Annotated[Path, typer.Argument(help="A TOML file that describes the market (docs/how-to.md).")],
    out: Annotated[Path, typer.Option(help="Folder for report.html and summary.json.")] = Path("out/run"),
    data_dir: DataDir = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Overrides the file's seed.")] = None,
    json: Json = False,
) -> None:
    """Run the market that a file describes, and write its report."""
    from flmarket.cli.markets import run_market

    run_market(market, out, data_dir, seed, json)


@app.command(
    epilog="Examples: `flmarket compare --population flm22-iid`; "
    "`flmarket compare --data breast-cancer --auction m1 --auction posted --seeds 3 --out out/compare`; "
    "`flmarket compare --data digits --market examples/digits.toml --perturbation laplace-l1 --perturbation privunit`."
)
def compare(
    population: Annotated[str, typer.Option(help="Bidders to draw: see `flmarket mechanisms`.")] = "flm22-iid",
    data: Annotated[str | None, typer.Option(help="Train on this data set instead, and compare accuracy.")] = None,
    market: Annotated[
        Path | None, typer.Option(help="With --data: a TOML file with the settings to vary from.")
    ] = None,
    auction: Annotated[list[str] | None, typer.Option(help="Repeat for several; default all.")] = None,
    aggregation: Annotated[list[str] | None, typer.Option(help="Repeat for several.")] = None,
    perturbation: Annotated[
        list[str] | None, typer.Option(help="With --data: repeat for several kinds of noise.")
    ] = None,
    factor: Annotated[list[float] | None, typer.Option(min=0, help="Budgets as shares of all costs.")] = None,
    profiles: Annotated[int, typer.Option(min=1, max=1_000_000, help="Profiles per budget factor.")] = 2000,
    owners: Annotated[int | None, typer.Option(min=1, help="Owners per profile; default the paper's.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="With --data: runs to average over.")] = 3,
    rounds: Annotated[int | None, typer.Option(min=1, help="With --data: rounds per run.")] = None,
    data_dir: DataDir = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for plot, CSV and page.")] = None,
    json: Json = False,
) -> None:
    """Auctions × aggregations on one population (error bound) or one data set (accuracy)."""
    from flmarket.cli.compare import compare_on_data, compare_on_population

    if data is None:
        compare_on_population(population, auction, aggregation, factor, profiles, owners, seed, out, json)
    else:
        compare_on_data(
            data, market, auction, aggregation, perturbation, factor, rounds, seeds, seed, data_dir, out, json
        )


@app.command(
    epilog="Examples: `flmarket audit m1 --population jdp --profiles 500 --seed 1 --json`; "
    "`flmarket audit all-in --search strong --report out/all-in.html`; `flmarket audit mypackage.mymodule:MyAuction`."
)
def audit(
    mechanism: Annotated[str, typer.Argument(help="A registered auction, or package.module:Class.")],
    population: Annotated[str, typer.Option(help="Bidders to draw: see `flmarket mechanisms`.")] = "flm22-iid",
    profiles: Annotated[int, typer.Option(min=1, max=1_000_000, help="Random profiles.")] = 500,
    owners: Annotated[int | None, typer.Option(min=1, help="Owners per profile; default the paper's.")] = None,
    search: Annotated[str, typer.Option(help="How hard to look for lies that pay: quick or strong.")] = "quick",
    seed: Seed = 0,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page here.")] = None,
    json: Json = False,
) -> None:
    """Is it truthful, rational and within budget? Measure what a mechanism claims; ours or anybody's."""
    from flmarket.cli.audit import run_audit

    run_audit(mechanism, population, profiles, owners, search, seed, json, report)


@app.command(epilog="Example: `flmarket reproduce stack --quick --out out/stack` and open `out/stack/index.html`.")
def reproduce(
    paper: Annotated[str, typer.Argument(help="samp, stack or all.")],
    out: Annotated[Path, typer.Option(help="Folder for plots, CSV and the index page.")] = Path("out/reproduce"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller data, fewer rounds and seeds.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Runs to average over; default 5, quick 2.")
    ] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """The tables and figures of a paper, next to what it printed, with a verdict for each."""
    from flmarket.cli.reproduce import run_reproduction

    run_reproduction(paper, out, quick, seeds, data_dir, json)


@app.command(
    name="train-auction",
    epilog="Example: `flmarket train-auction posted --population flm22-iid --unit 1 --out menu.json`, then "
    "`auctions.get('posted', menu='menu.json')`.",
)
def train_auction(
    preset: Annotated[str, typer.Argument(help="What to train: posted.")],
    population: Annotated[list[str], typer.Option(help="Bidders to train on; repeat for several.")],
    out: Annotated[Path, typer.Option(help="Where to write the menu, after every generation.")] = Path("menu.json"),
    profiles: Annotated[int, typer.Option(min=1, max=200_000, help="Random profiles to train on.")] = 3000,
    generations: Annotated[int, typer.Option(min=1, max=100_000, help="Generations of the search.")] = 150,
    unit: Annotated[
        float | None, typer.Option(min=0, help="What a record at ε = 1 is typically worth, if known beforehand.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="Go on from this menu.")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Fit a learned auction to a population. Its guarantees do not depend on the training; its accuracy does."""
    from flmarket.cli.training import train_auction as train

    train(preset, population, profiles, generations, unit, start, seed, out, json)


@app.command(epilog="Example: `flmarket mechanisms --json`.")
def mechanisms(json: Json = False) -> None:
    """What there is: auctions and what each guarantees, aggregations, perturbations, populations, data sets."""
    from flmarket.cli.mechanisms import list_mechanisms

    list_mechanisms(json)
