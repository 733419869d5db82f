"""The rule behind every verdict: planted effects are seen, noise is not, and redrawn seeds do not change its mind."""

import dataclasses

import numpy as np
import pytest

from flmarket.experiments import items, stack
from flmarket.experiments.items import (
    LEVEL,
    Check,
    Estimate,
    Item,
    Job,
    agreed,
    combined,
    exact,
    from_checks,
    judged,
    missing,
    trend,
)
from flmarket.experiments.units import Finished, Settings, Unit, agreement, run_units

DRAWS = 4000


def verdicts(mean, runs, judge, sd=1.0, draws=DRAWS):
    rng = np.random.default_rng(7)
    found = [judge(rng.normal(mean, sd, runs)) for _ in range(draws)]
    return {verdict: found.count(verdict) / draws for verdict in ("reproduced", "differs", "undecided")}


def positive(values):
    return judged({"gap": Estimate.of(values)}, above=0.0).verdict


@pytest.mark.parametrize("runs", [2, 3, 5, 20, 200])
def test_noise_alone_is_rarely_called_anything(runs):
    """The cheat that this replaces, two standard errors with few runs, errs in a third of cases at two runs."""
    found = verdicts(0.0, runs, positive)
    error = 4 * np.sqrt(LEVEL * (1 - LEVEL) / DRAWS)
    assert found["reproduced"] + found["differs"] == pytest.approx(1 - LEVEL, abs=error)
    old = verdicts(0.0, runs, lambda v: "reproduced" if v.mean() > 2 * v.std(ddof=1) / np.sqrt(runs) else "undecided")
    assert old["reproduced"] > found["reproduced"]


def test_true_and_opposite_effects_are_found_with_the_power_that_is_stated():
    strong, opposite = verdicts(1.0, 30, positive), verdicts(-1.0, 30, positive)
    assert strong["reproduced"] > 0.99
    assert opposite["differs"] > 0.99
    assert strong["differs"] == opposite["reproduced"] == 0
    weak = Estimate.of(np.random.default_rng(0).normal(0.3, 1.0, 20))
    found = judged({"gap": weak}, above=0.0)
    assert found.verdict == "undecided"
    needed = int(found.text.split("about ")[1].split(" ")[0].replace(",", ""))
    more = Estimate(weak.mean, weak.se * np.sqrt(20 / needed), needed)  # the same mean and spread from so many
    assert judged({"gap": more}, above=0.0).verdict == "reproduced"


def test_a_level_is_as_printed_only_if_the_interval_fits():
    def within(values):
        return judged({"ratio": Estimate.of(values)}, above=0.92, below=0.96).verdict

    assert within([0.93, 0.94, 0.95, 0.94]) == "undecided"
    assert within([0.939, 0.940, 0.941, 0.940]) == "reproduced"
    assert within([0.989, 0.990, 0.991, 0.990]) == "differs"
    assert verdicts(0.99, 10, within, sd=0.01)["reproduced"] == 0


def test_one_run_and_missing_values_decide_nothing():
    for values in ([1.0], [1.0, np.inf], [1.0, np.nan], []):
        found = judged({"gap": Estimate.of(values)}, above=0.0)
        assert found.verdict == "undecided"
    assert judged({}, above=0.0).verdict == "undecided"
    assert missing("no weights").verdict == "undecided"
    assert "no interval" in judged({"gap": Estimate.of([1.0])}, above=0.0).text


def test_every_part_counts_and_many_parts_are_not_more_often_wrong():
    good, bad, none = (Estimate.of(np.random.default_rng(s).normal(m, 1, 50)) for s, m in ((1, 2), (2, -2), (3, 0)))
    assert judged({"a": good, "b": good}, above=0.0).verdict == "reproduced"
    assert judged({"a": good, "b": none}, above=0.0).verdict == "undecided"
    assert judged({"a": good, "b": bad}, above=0.0).verdict == "differs"

    def many(values):
        return judged({str(k): Estimate.of(row) for k, row in enumerate(values.reshape(20, 5))}, above=0.0).verdict

    assert verdicts(0.0, 100, many, draws=1500)["differs"] < 0.015


def test_equal_is_enough_where_the_claim_says_so():
    zero = Estimate.of([0.0, 0.0, 0.0])
    assert judged({"IR": zero}, above=0.0).verdict == "differs"
    assert judged({"IR": zero}, above=0.0, or_equal=True).verdict == "reproduced"
    assert judged({"over": Estimate.of([0.1, 0.2, 0.15])}, below=0.0, or_equal=True).verdict != "reproduced"


def test_shares_have_exact_intervals():
    none = Estimate.share(np.zeros(2500, dtype=bool))
    assert none.interval()[0] == 0
    assert 0 < none.interval()[1] < 0.0025
    assert judged({"": none}, below=0.01).verdict == "reproduced"
    assert judged({"": Estimate.share(np.arange(2500) % 20 == 0)}, below=0.01).verdict == "differs"
    rng, p = np.random.default_rng(0), 0.02
    inside = [low <= p <= high for low, high in (Estimate.share(rng.random(300) < p).interval() for _ in range(1000))]
    assert np.mean(inside) >= LEVEL - 0.005


def curves(slope, runs=20, sd=0.3, seed=0):
    rng = np.random.default_rng(seed)
    return np.linspace(0, slope, 5) + rng.normal(0, sd, (runs, 5)) + rng.normal(0, 5, (runs, 1))


@pytest.mark.parametrize(
    ("values", "sign", "verdict"),
    [
        (curves(2.0), +1, "reproduced"),
        (curves(2.0), -1, "differs"),
        (curves(0.0), +1, "undecided"),
        (np.array([[1, 3, 2], [1, 3, 2.01], [1, 3, 1.99]]), +1, "differs"),  # a clear step back
        (np.array([[1.0, 2.0, 3.0]]), +1, "undecided"),  # one run
    ],
)
def test_trends_are_paired_along_the_curve(values, sign, verdict):
    assert trend(values, sign).verdict == verdict


def test_a_step_back_matters_only_where_the_claim_is_about_steps():
    values = np.array([[1, 3, 2], [1, 3, 2.01], [1, 3, 1.99]])
    assert trend(values, +1, steps=False).verdict == "reproduced"


def test_gains_that_grow_are_not_diminishing():
    noise = np.random.default_rng(0).normal(0, 0.01, (10, 3))
    assert trend(np.array([0.0, 3.0, 4.0]) + noise, +1, diminishing=True).verdict == "reproduced"
    assert trend(np.array([0.0, 1.0, 4.0]) + noise, +1, diminishing=True).verdict == "differs"
    assert trend(np.array([0.0, 2.0, 4.0]) + noise, +1, diminishing=True).verdict == "undecided"


def test_verdicts_combine_and_agree():
    assert combined([]) == combined(["not run"]) == "not run"
    assert combined(["reproduced", "not run"]) == "reproduced"
    assert combined(["reproduced", "undecided"]) == "undecided"
    assert combined(["undecided", "differs", "reproduced"]) == "differs"
    assert agreed(["differs"] * 3) == "differs"
    assert agreed(["reproduced", "undecided", "reproduced"]) == agreed(["reproduced", "differs"]) == "undecided"
    both = exact(True, "a") & exact(False, "b") + "!"
    assert (both.verdict, both.text) == ("differs", "a; b!")


def test_a_verdict_on_which_draws_do_not_agree_is_undecided():
    def drawn(*verdicts):
        checks = [Check(f"c{k}", "claim.", verdict, "numbers") for k, verdict in enumerate(verdicts)]
        return [Finished(Unit("p", "i"), True, 2, 1.0, (from_checks("p-i", "t", checks),))]

    (one,) = agreement(
        [drawn("reproduced", "differs"), drawn("reproduced", "undecided"), drawn("reproduced", "differs")]
    )
    assert [check.verdict for check in one.items[0].checks] == ["reproduced", "undecided"]
    assert one.items[0].verdict == "undecided"
    assert "Draws: differs, undecided, differs." in one.items[0].note
    assert one.items[0].checks[0].evidence == "numbers"
    assert "disagree (differs: numbers; undecided: numbers; differs: numbers)" in one.items[0].checks[1].evidence
    plain = [Finished(Unit("p", "i"), True, 2, 1.0, (Item("p-i", "t", "", "not run", "no data"),))]
    assert agreement([plain, plain])[0].items[0].verdict == "not run"


def test_draws_have_seeds_of_their_own(tmp_path):
    jobs = [dataclasses.replace(Settings(True, 5), draw=d).job(tmp_path, print) for d in range(3)]
    seeds = [set(job.runs(40, 100)) for job in jobs]
    assert len(set().union(*seeds)) == sum(map(len, seeds))
    assert list(jobs[0].seeds) == [0, 1, 2, 3, 4]
    assert len(jobs[1].runs(40, 100)) == 200


@pytest.mark.parametrize("unit", [Unit("stack", "fig2"), Unit("samp", "fig4"), Unit("jdp", "fig2")])
def test_no_verdict_changes_when_seeds_are_redrawn(unit, tmp_path, monkeypatch):
    """The quick units that take seconds; the others by `flmarket reproduce all --quick --draws 3`."""
    monkeypatch.setattr(stack, "RUNS", (10, 10))
    monkeypatch.setattr(items.Sheet, "draw", lambda *_, **__: None)  # drawing has its own tests
    settings = Settings(quick=True, seeds=3)
    draws = [run_units([unit], tmp_path / str(d), dataclasses.replace(settings, draw=d)) for d in range(3)]
    seen = [[(c.key, c.verdict) for one in draw for item in one.items for c in item.checks] for draw in draws]
    assert seen[0] == seen[1] == seen[2]
    numbers = [[item.numbers for one in draw for item in one.items] for draw in draws]
    assert numbers[0] != numbers[1]  # other seeds, really


def test_a_kept_run_is_read_and_a_damaged_one_repeated(tmp_path):
    job, calls = Job(tmp_path, True, range(2)), []

    def run():
        calls.append(1)
        return {"x": len(calls)}

    assert job.kept("runs", {"a": 1}, run) == job.kept("runs", {"a": 1}, run) == {"x": 1}
    assert job.kept("runs", {"a": 2}, run) == {"x": 2}
    for path in (tmp_path / "runs").iterdir():
        path.write_text("{", encoding="utf-8")
    assert job.kept("runs", {"a": 1}, run) == {"x": 3}
