"""The commands and their options; each does its work in a module of its own."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from flmarket import __version__
from flmarket.cli import flower, ledger
from flmarket.cli.parties import Json, bought, buyer, owner

app = typer.Typer(
    name="flmarket",
    help="Markets in federated learning: auctions, private updates, aggregation and exact payments.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(ledger.app)

Seed = Annotated[int, Option(min=0, help="Everything random follows from it.")]
DataDir = Annotated[Path | None, Option(help="Where data sets lie; else FLMARKET_DATA, the cache, then a download.")]


def _version(value: bool) -> None:
    if value:
        print(f"flmarket {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Markets in federated learning: auctions, private updates, aggregation and exact payments."""


@app.command(epilog="Example: `flmarket demo --out out/demo` and open `out/demo/report.html`.")
def demo(
    out: Annotated[Path, Option(help="Folder for report.html and summary.json.")] = Path("out/demo"),
    rounds: Annotated[int | None, Option(min=1, help="How many rounds to play.")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Hospitals sell private updates for a diagnosis model: a whole market on bundled data, in seconds."""
    from flmarket.cli.markets import run_demo

    run_demo(out, rounds, seed, json)


@app.command(epilog="Example: `flmarket run market.toml --out out/run --data-dir ~/data`.")
def run(
    market: Annotated[Path, Argument(help="A TOML file that describes the market (docs/how-to.md).")],
    out: Annotated[Path, Option(help="Folder for report.html and summary.json.")] = Path("out/run"),
    data_dir: DataDir = None,
    seed: Annotated[int | None, Option(min=0, help="Overrides the file's seed.")] = None,
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
    population: Annotated[str, Option(help="Bidders to draw: see `flmarket mechanisms`.")] = "flm22-iid",
    data: Annotated[str | None, Option(help="Train on this data set instead, and compare accuracy.")] = None,
    market: Annotated[Path | None, Option(help="With --data: a TOML file with the settings to vary from.")] = None,
    auction: Annotated[list[str] | None, Option(help="Repeat for several; default all.")] = None,
    aggregation: Annotated[list[str] | None, Option(help="Repeat for several.")] = None,
    perturbation: Annotated[list[str] | None, Option(help="With --data: repeat for several kinds of noise.")] = None,
    factor: Annotated[list[float] | None, Option(min=0, help="Budgets as shares of all costs.")] = None,
    profiles: Annotated[int, Option(min=1, max=1_000_000, help="Profiles per budget factor.")] = 2000,
    owners: Annotated[int | None, Option(min=1, help="Owners per profile; default the paper's.")] = None,
    seeds: Annotated[int, Option(min=1, help="With --data: runs to average over.")] = 3,
    rounds: Annotated[int | None, Option(min=1, help="With --data: rounds per run.")] = None,
    data_dir: DataDir = None,
    seed: Seed = 0,
    out: Annotated[Path | None, Option(help="Folder for plot, CSV and page.")] = None,
    json: Json = False,
) -> None:
    """Auctions × aggregations on one population (error bound) or one data set (accuracy)."""
    from flmarket.cli.experiments import compare_on_data, compare_on_population

    if data is None:
        compare_on_population(population, auction, aggregation, factor, profiles, owners, seed, out, json)
    else:
        compare_on_data(
            data, market, auction, aggregation, perturbation, factor, rounds, seeds, seed, data_dir, out, json
        )


@app.command(
    epilog="Examples: `flmarket audit m1 --population jdp --profiles 500 --seed 1 --json`; "
    "`flmarket audit all-in --search strong --report out/all-in.html`; `flmarket audit mypackage.mymodule:MyAuction`; "
    "`flmarket audit sampling:optimal --population exponential-costs`; `flmarket audit posted --attack sybil`."
)
def audit(
    mechanism: Annotated[str, Argument(help="A registered auction, sampling:SCHEME, or package.module:Class.")],
    population: Annotated[
        str | None, Option(help="Bidders to draw: see `flmarket mechanisms`; default flm22-iid or uniform-costs.")
    ] = None,
    profiles: Annotated[
        int | None, Option(min=1, max=1_000_000, help="Random profiles; default 500, of an attack 40.")
    ] = None,
    owners: Annotated[int | None, Option(min=1, help="Owners per profile; default the paper's.")] = None,
    search: Annotated[
        str | None, Option(help="How hard to look for lies that pay: quick (the default) or strong.")
    ] = None,
    attack: Annotated[
        str | None, Option(help="Instead: returning (an owner over 20 rounds), sybil (several names) or split-task.")
    ] = None,
    seed: Seed = 0,
    report: Annotated[Path | None, Option(help="Write an HTML page here.")] = None,
    trust: Annotated[
        str | None, Option(help="Compare with the first best of local (the default) or secure-aggregation.")
    ] = None,
    weights: Annotated[
        Path | None, Option(help="A learned auction's weights: keep these figures, and a certificate, in this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Is it truthful, rational and within budget? Measure what a mechanism claims; ours or anybody's."""
    from flmarket.cli.audit import run_attack, run_audit

    if attack is not None:
        unused = {"search": search, "report": report, "trust": trust, "weights": weights}
        run_attack(attack, mechanism, population, profiles, owners, seed, json, **unused)
    else:
        run_audit(
            mechanism,
            population,
            profiles or 500,
            owners,
            search or "quick",
            seed,
            json,
            report,
            trust or "local",
            weights,
        )


@app.command(
    epilog="Examples: `flmarket reproduce stack --quick --out out/stack` and open `out/stack/index.html`; "
    "`flmarket reproduce flm22:fig7`; `flmarket reproduce all --quick --jobs 2 --data-dir DIR`. Run it again to go on "
    "where it stopped."
)
def reproduce(
    paper: Annotated[str, Argument(help="flm21, flm22, samp, stack, jdp, beyond, PAPER:ITEM, or all.")],
    out: Annotated[Path, Option(help="Folder for plots, CSV and the index page.")] = Path("out/reproduce"),
    quick: Annotated[bool, Option("--quick", help="Smaller data, fewer rounds and seeds.")] = False,
    seeds: Annotated[int | None, Option(min=1, max=1000, help="Runs to average over; default 5.")] = None,
    jobs: Annotated[int, Option(min=1, max=256, help="Tables and figures at a time, a core each.")] = 1,
    data_dir: DataDir = None,
    fresh: Annotated[bool, Option("--fresh", help="Run again what is done already.")] = False,
    draws: Annotated[
        int, Option(min=1, max=20, help="Draw the seeds so often; a verdict that changes is undecided.")
    ] = 1,
    json: Json = False,
) -> None:
    """The tables and figures of a paper, next to what it printed, with a verdict for each."""
    from flmarket.cli.experiments import run_reproduction

    run_reproduction(
        paper, out, quick=quick, seeds=seeds, jobs=jobs, data_dir=data_dir, fresh=fresh, as_json=json, draws=draws
    )


@app.command(
    name="train-auction",
    epilog="Examples: `flmarket train-auction cleared-menu --population flm22-iid --out mine.safetensors`, then "
    "`auctions.get('cleared-menu', weights='mine.safetensors')`; "
    "`flmarket train-auction dm-regretnet --preset paper --population flm22-iid --checkpoints DIR`; "
    "`flmarket train-auction posted --population flm22-iid --out menu.json`.",
)
def train_auction(
    name: Annotated[str, Argument(help="What to train: posted, cleared-menu, dm-regretnet, … (docs/learned.md).")],
    population: Annotated[list[str] | None, Option(help="Bidders to train on; for posted, repeat for several.")] = None,
    bids: Annotated[Path | None, Option(help="Instead: a CSV or JSON file of your owners' past bids.")] = None,
    out: Annotated[Path | None, Option(help="Where to write; default menu.json or NAME.safetensors.")] = None,
    profiles: Annotated[
        int | None, Option(min=1, max=200_000, help="Profiles per step or batch (posted: 384).")
    ] = None,
    steps: Annotated[int, Option(min=1, max=1_000_000, help="posted: steps of the descent.")] = 2400,
    explorers: Annotated[
        int | None,
        Option(min=0, max=1000, help="posted: how many of the smallest speak first (2 where money has no known unit)."),
    ] = None,
    aggregation: Annotated[
        str, Option(help="posted: how updates will be weighed: opt-aggr, conventional, secure-opt.")
    ] = "opt-aggr",
    unit: Annotated[
        float | None,
        Option(min=0, help="posted: what a record at ε = 1 is typically worth, if not what these bidders say."),
    ] = None,
    start: Annotated[Path | None, Option(help="posted: go on from this menu.")] = None,
    epochs: Annotated[int | None, Option(min=1, max=100_000, help="Networks: epochs at most.")] = None,
    batches: Annotated[int | None, Option(min=1, max=100_000, help="Networks: batches per epoch.")] = None,
    misreports: Annotated[int | None, Option(min=1, max=10_000, help="Networks: lies tried per owner.")] = None,
    regret_weight: Annotated[float | None, Option(min=0, help="Networks: first multiplier of regret.")] = None,
    owners: Annotated[int, Option(min=1, max=1000, help="Owners per profile.")] = 10,
    threads: Annotated[int, Option(min=1, max=64, help="Networks: processor threads.")] = 1,
    resume: Annotated[bool, Option("--resume", help="Networks: go on from the checkpoint beside --out.")] = False,
    audit_profiles: Annotated[
        int, Option(min=0, max=100_000, help="Networks: profiles of the final audit; 0 for none.")
    ] = 100,
    preset: Annotated[
        str, Option(help="The papers' networks: their whole schedule (paper), or a minute's (short).")
    ] = "paper",
    checkpoints: Annotated[
        Path | None, Option(help="The papers' networks: where to keep state and curve; goes on from there.")
    ] = None,
    iterations: Annotated[
        int | None, Option(min=0, help="The papers' networks: stop after so many in all, and write the weights.")
    ] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Fit a learned auction to a population or to your own owners' bids. Within budget whatever the training brings."""
    from flmarket.cli import training

    if name == "posted":
        if not population and bids is None:
            raise typer.BadParameter("posted needs at least one --population, or --bids")
        menu = Path("menu.json") if out is None else out
        count = 384 if profiles is None else profiles
        fit = training.MenuOptions(count, steps, unit, explorers, aggregation, owners, start)
        training.train_menu(population or (), bids, fit, seed, menu, json)
        return
    if population is not None and len(population) > 1:
        raise typer.BadParameter("a network is trained on one --population")
    options = training.LearningOptions(
        profiles, epochs, batches, misreports, regret_weight, owners, threads, resume, audit_profiles,
        preset, checkpoints, iterations,
    )  # fmt: skip
    weights = Path(f"{name}.safetensors") if out is None else out
    training.train_network(name, population[0] if population else None, bids, options, seed, weights, json)


@app.command(epilog="Examples: `flmarket serve --demo`; `flmarket serve --db postgresql+psycopg://user@host/market`.")
def serve(
    db: Annotated[
        str | None, Option(envvar="FLMARKET_DB", help="Database address; default SQLite in this folder.")
    ] = None,
    host: Annotated[str, Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65_535, help="Where to listen.")] = 8642,
    demo: Annotated[bool, Option("--demo", help="A seeded market with tasks running, to look at.")] = False,
    secure_cookies: Annotated[
        bool | None, Option("--secure-cookies", help="Set it when behind HTTPS.", show_default=False)
    ] = None,
    superlink: Annotated[str | None, Option(help="For Flower tasks: a connection in $FLWR_HOME/config.toml.")] = None,
    flower_folder: Annotated[Path | None, Option(help="Where Flower runs keep their state.")] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        Option(help="An address or network whose X-Forwarded-For is believed; repeat. Default: nobody's."),
    ] = None,
    data_dir: DataDir = None,
    settings: Annotated[
        Path | None, Option(envvar="FLMARKET_SETTINGS", help="A TOML file of settings (see --show-settings).")
    ] = None,
    set_: Annotated[
        list[str] | None, Option("--set", help="Any setting, as name=value; repeat. Or FLMARKET_NAME=value.")
    ] = None,
    show_settings: Annotated[
        bool, Option("--show-settings", help="Print a settings file with all defaults, and end.")
    ] = False,
) -> None:
    """Run the broker: the HTTP service and the web market (docs/broker.md)."""
    from flmarket.cli import parties

    if show_settings:
        parties.show_settings()
        return
    options = {
        "database_url": db,
        "data_dir": data_dir,
        "secure_cookies": secure_cookies,
        "superlink": superlink,
        "flower_folder": flower_folder,
        "trusted_proxies": tuple(trusted_proxy) if trusted_proxy else None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    parties.serve(host, port, given, demo=demo, settings_file=settings, more=set_ or ())


app.add_typer(buyer, name="buyer")
app.add_typer(bought, name="model")
flower.owner_app.registered_commands += owner.registered_commands  # one `flmarket owner`, at a SuperLink and a broker


@app.command(epilog="Examples: `flmarket torture --seed 1 --rounds 20000`; `flmarket torture --hours 8`; a seed that "
    "failed, again: `flmarket torture --run 1000007`.")  # fmt: skip
def torture(
    seed: Annotated[int | None, typer.Option(min=0, help="Where to begin; default the clock's, printed.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Until so many rounds were played.")] = None,
    hours: Annotated[float | None, typer.Option(min=0.0, help="Until so much time has passed.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes, a core each.")] = 1,
    world: Annotated[str | None, typer.Option(help="Only this one: nodes or service.")] = None,
    run: Annotated[int | None, typer.Option(min=0, help="One run alone, told as a story.")] = None,
    json: Json = False,
) -> None:
    """Break it: the whole market in one process, with crashes, lost messages, liars and everything else that fails."""
    from flmarket.cli.audit import run_torture

    run_torture(seed, rounds, hours, world=world, run=run, jobs=jobs, as_json=json)


@app.command(epilog="Example: `flmarket mechanisms --json`.")
def mechanisms(json: Json = False) -> None:
    """What there is: auctions and what each guarantees, aggregations, perturbations, populations, data sets."""
    from flmarket.cli.audit import list_mechanisms

    list_mechanisms(json)


flower.register(app)  # deploy, owner
