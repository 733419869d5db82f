"""The command's machinery: selection, records, processes, claims and the page."""

import json
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flmarket import InvalidInput
from flmarket.cli import experiments as command
from flmarket.errors import DataUnavailable, UnknownName
from flmarket.experiments import stack, units
from flmarket.experiments.items import CLAIMS, PAPERS, Check, Claim, Item, exact, from_checks, judge, missing
from flmarket.experiments.units import Settings, Unit, papers, run_units, select
from flmarket.report.comparison import ClaimRow, PaperSection, write_reproduction

QUICK = Settings(quick=True, seeds=1)


@pytest.fixture
def paper(monkeypatch, tmp_path):
    """A paper with two items that count how often they are run."""
    module = types.ModuleType("flmarket.experiments.invented")
    module.__file__ = str(tmp_path / "invented.py")
    (tmp_path / "invented.py").write_text("first version")
    module.calls = []

    def item(key):
        def work(job):
            module.calls.append(key)
            job.step("working")
            (job.out_dir / f"{key}.csv").write_text("x\n")
            return Item(f"invented-{key}", key, "a claim", "reproduced", "so", (f"{key}.csv",), {"nan": float("nan")})

        return work

    module.ITEMS = {"one": item("one"), "two": item("two")}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


UNITS = (Unit("invented", "one"), Unit("invented", "two"))


def test_what_is_done_is_not_run_again(paper, tmp_path):
    out = tmp_path / "out"
    first = run_units(UNITS, out, QUICK)
    again = run_units(UNITS, out, QUICK)
    assert paper.calls == ["one", "two"]
    assert [one.items for one in first] == [one.items for one in again]
    assert first[0].items[0].numbers == {"nan": None}  # strict JSON


def _other_release(record):
    """Items as another release writes them: they are not ours to read."""
    known = json.loads(record.read_text())
    record.write_text(json.dumps(known | {"items": [{"key": "invented-one", "files": []}]}))
    return QUICK


@pytest.mark.parametrize(
    "change",
    [
        lambda paper, out: Settings(quick=False, seeds=1),
        lambda paper, out: Settings(quick=True, seeds=2),
        lambda paper, out: Settings(quick=True, seeds=1, data_dir=out),
        lambda paper, out: Settings(quick=True, seeds=1, draw=1),
        lambda paper, out: (out.parent / "invented.py").write_text("second version") and QUICK,
        lambda paper, out: (out / "one.csv").unlink() or QUICK,
        lambda paper, out: (out / "units" / "invented-one.json").write_text("{broken") and QUICK,
        lambda paper, out: _other_release(out / "units" / "invented-one.json"),
        lambda paper, out: setattr(paper, "ENTRANTS", ("posted",)) or QUICK,
    ],
    ids=["scale", "seeds", "data", "draw", "code", "missing file", "broken record", "other release", "auctions"],
)
def test_it_is_run_again_when_something_that_matters_has_changed(paper, tmp_path, change):
    out = tmp_path / "out"
    run_units(UNITS[:1], out, QUICK)
    run_units(UNITS[:1], out, change(paper, out))
    assert paper.calls == ["one", "one"]


def test_fresh_runs_everything(paper, tmp_path):
    run_units(UNITS, tmp_path, QUICK)
    run_units(UNITS, tmp_path, QUICK, fresh=True)
    assert paper.calls == ["one", "two", "one", "two"]


def test_an_interrupted_run_goes_on_where_it_stopped(paper, tmp_path):
    def interrupted(job):
        raise KeyboardInterrupt

    working, paper.ITEMS["two"] = paper.ITEMS["two"], interrupted
    with pytest.raises(KeyboardInterrupt):
        run_units(UNITS, tmp_path, QUICK)
    paper.ITEMS["two"] = working
    run_units(UNITS, tmp_path, QUICK)
    assert paper.calls == ["one", "two"]


def test_missing_data_is_said_and_tried_again(paper, tmp_path):
    def missing(job):
        raise DataUnavailable("no such data")

    working, paper.ITEMS["two"] = paper.ITEMS["two"], missing
    (found,) = run_units(UNITS[1:], tmp_path, QUICK)
    assert found.items[0].verdict == "not run"
    assert "no such data" in found.items[0].reason
    paper.ITEMS["two"] = working
    assert run_units(UNITS[1:], tmp_path, QUICK)[0].items[0].verdict == "reproduced"


def test_processes_give_what_one_process_gives(tmp_path):
    chosen = (Unit("stack", "equilibrium"), Unit("samp", "fig1"))
    notes = []
    alone = run_units(chosen, tmp_path / "alone", QUICK)
    beside = run_units(chosen, tmp_path / "beside", QUICK, jobs=2, report=lambda unit, note: notes.append((unit, note)))
    assert [one.items for one in alone] == [one.items for one in beside]
    assert {unit for unit, note in notes if not note} == set(chosen)
    assert any(note for _, note in notes)
    for one in beside:
        assert all((tmp_path / "beside" / name).exists() for item in one.items for name in item.files)


def test_selection():
    known = papers()
    assert {"flm21", "flm22", "samp", "stack", "beyond"} <= set(known)
    assert next(iter(known)) == "flm21"
    assert select("flm22:fig7") == (Unit("flm22", "fig7"),)
    assert {unit.paper for unit in select("all")} == set(known)
    for wrong in ("flm99", "flm22:fig99", "stack:"):
        with pytest.raises(UnknownName):
            select(wrong)


@pytest.mark.parametrize("seeds", [0, -1, True, 1.5])
def test_seeds_are_checked(seeds):
    with pytest.raises(InvalidInput):
        Settings(quick=True, seeds=seeds)


def test_our_own_statement_cannot_save_or_spoil_the_papers():
    skipped = Check.of("a", "theirs.", missing("no weights"))
    ours = [Check.of("b", "ours.", exact(holds, "figures"), beyond=True) for holds in (True, False)]
    assert from_checks("k", "t", [skipped, ours[0]]).verdict == "undecided"
    assert from_checks("k", "t", [Check.of("a", "theirs.", exact(True, "x")), ours[1]]).verdict == "reproduced"
    assert from_checks("k", "t", ours).verdict == "differs"


def test_claims_find_their_evidence():
    items = [
        from_checks(
            "flm22-fig7-iid", "Figure 7", [Check("a", "c", "reproduced", "x"), Check("b", "c", "differs", "y")]
        ),
        from_checks("flm22-fig7-niid", "Figure 7", [Check("a", "c", "reproduced", "z")]),
    ]
    first, second, third = judge(
        items,
        [
            Claim("flm22", "", "", ("flm22-fig7-*#a",)),
            Claim("flm22", "", "", ("flm22-fig7-iid",)),
            Claim("flm22", "", "", ("flm22-fig8-*",)),
        ],
    )
    assert (first.verdict, first.items) == ("reproduced", ("flm22-fig7-iid", "flm22-fig7-niid"))
    assert (second.verdict, third.verdict, third.items) == ("differs", "not run", ())


# the experiments paragraphs: every table and figure that the papers report
FIGURES = {
    "flm21": ("Fig. 5", "Fig. 6", "Fig. 7", "Fig. 8", "Table 1"),
    "flm22": ("Fig. 7", "Fig. 8", "Fig. 9", "Fig. 10", "Table I"),
    "samp": ("Fig. 1", "Fig. 2", "Figs. 2, 3", "Fig. 4", "Alg. 1"),
    "stack": ("Fig. 2(a)", "Fig. 2(b)", "Fig. 3(a)", "Fig. 3(b)", "Fig. 4(a)", "Fig. 4(b)", "eq. (17)", "Alg. 2"),
    "jdp": ("Fig. 2", "Fig. 2(d)", "Fig. 3", "Fig. 4", "Fig. 5", "Thm. 3", "§4.2", "§4.2.1", "Alg. 4"),
}


def test_every_table_and_figure_of_the_papers_has_a_claim():
    for paper, figures in FIGURES.items():
        assert set(figures) == {claim.where for claim in CLAIMS if claim.paper == paper}
    assert {claim.paper for claim in CLAIMS} <= set(PAPERS)
    assert set(papers()) <= set(PAPERS)


def test_the_documentation_has_every_claim():
    page = (Path(__file__).parents[2] / "docs" / "reproductions.md").read_text()
    for claim in CLAIMS:
        assert f"| {claim.where} | {claim.text} |" in page


def test_the_page_links_claims_to_items_and_escapes(tmp_path):
    made = from_checks("x-fig1", "A <b>figure</b>", [Check("a", "It falls.", "reproduced", "by half")])
    item = replace(made, files=("f.svg", "f.csv"), beside=(("row", "1.0", "1.1"),), note="A note.")
    (tmp_path / "f.svg").write_text("<svg/>")
    section = PaperSection(
        "x", "Paper", "Somebody", (ClaimRow("Fig. 1", "It falls.", "reproduced", ("x-fig1", "gone"), ("by half",)),),
        (command.asdict(item),),
    )  # fmt: skip
    page = write_reproduction([section], tmp_path, command="flmarket reproduce x").read_text()
    assert 'href="#x-fig1"' in page
    assert 'id="x-fig1"' in page
    assert "#gone" not in page
    assert "A &lt;b&gt;figure" in page
    for text in ("1 claims reproduced", "by half", "1.1", "A note.", 'src="f.svg"'):
        assert text in page
    assert json.loads((tmp_path / "items.json").read_text())[0]["key"] == "x-fig1"
    assert "| Fig. 1 | It falls. | reproduced | by half. |" in (tmp_path / "claims.md").read_text()
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing is fetched from elsewhere


def test_the_command_writes_an_index_of_everything_in_the_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stack, "RUNS", (2, 2))
    options = {"quick": True, "seeds": 2, "jobs": 1, "data_dir": None, "fresh": False, "as_json": True}
    command.run_reproduction("samp:fig1", tmp_path, **options)
    command.run_reproduction("stack:fig2", tmp_path, **options)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [item["key"] for item in found["items"]] == ["stack-fig2a", "stack-fig2b"]
    command.run_reproduction("stack:equilibrium", tmp_path, **options, draws=2)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "Draws: reproduced, reproduced." in found["items"][0]["note"]
    assert (tmp_path / "draw-2" / "stack-equilibrium.csv").exists()
    page = (tmp_path / "index.html").read_text()
    for key in ("samp-q", "stack-fig2a", "stack-fig2b"):
        assert f'id="{key}"' in page


def test_units_have_no_randomness_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(stack, "RUNS", (2, 2))
    one, two = (run_units((Unit("stack", "fig2"),), tmp_path / name, QUICK) for name in ("a", "b"))
    np.testing.assert_equal(one[0].items[0].numbers, two[0].items[0].numbers)
    assert units.RECORDS == "units"


KILLED = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from flmarket.experiments import units

if __name__ == "__main__":
    context = get_context("spawn")
    notes = context.SimpleQueue()
    with ProcessPoolExecutor(1, mp_context=context, initializer=units._begin_worker, initargs=(notes,)) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 3600).result()
"""


def test_workers_end_when_the_command_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as started:
        worker = int(started.stdout.readline())
        started.kill()
    until = time.monotonic() + 60
    while _runs(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(worker)


def _runs(pid):
    """Whether a process is there and more than an entry that its new parent has not removed yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
