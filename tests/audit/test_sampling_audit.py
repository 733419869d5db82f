"""The audit of sampling schemes: ours keep their promises, and planted cheats are caught."""

import json

import numpy as np
import pytest

from flmarket.audit import audit_sampling
from flmarket.bids import EXACT, Guarantees
from flmarket.cli.audit import run_audit
from flmarket.errors import ConfigError, InvalidInput
from flmarket.sampling import OptimalSampling, PriorIndependent, StepSchedule

CLAIMED = Guarantees(EXACT, EXACT, EXACT, "nobody", "")


class PayAsBid:
    """The optimal q, but everybody is paid what she says: an invitation to overstate."""

    guarantees = CLAIMED

    def __init__(self, distribution, budget):
        self.inner = OptimalSampling.from_distribution(distribution, budget)

    def offer(self, cost):
        return self.inner.offer(cost)[0], np.asarray(cost, dtype=float)


class Stingy(PayAsBid):
    """Nine tenths of the truthful payment: the dearest lose."""

    def offer(self, cost):
        q, r = self.inner.offer(cost)
        return q, 0.9 * r


class Spendthrift(PayAsBid):
    """Truthful terms of a tenth more money than there is."""

    def __init__(self, distribution, budget):
        self.inner = OptimalSampling.from_distribution(distribution, 1.1 * budget)

    def offer(self, cost):
        return self.inner.offer(cost)


class TwoFaced(PriorIndependent):
    """Posts one schedule and pays by another that it makes from the report."""

    def report(self, cost):
        q, r = super().report(cost)
        return q, r * 1.01


class Forgetful(PriorIndependent):
    """Never subtracts what it promised, so later clients share money that is gone."""

    def _prepare(self):
        self.remaining_budget = self.budget
        super()._prepare()


def verdicts(found):
    return {claim.claim: claim.verdict for claim in found.claims}


@pytest.mark.parametrize("population", ["uniform-costs", "exponential-costs"])
@pytest.mark.parametrize("scheme", ["optimal", "uniform", "prior-independent"])
def test_ours_keep_what_they_claim(scheme, population):
    found = audit_sampling(scheme, population, 40, clients=30)
    assert verdicts(found) == {"truthful": "holds", "rational": "holds", "budget_feasible": "holds"}
    assert found.largest_gain_over_cost <= 1e-9
    assert found.lowest_utility >= 0
    assert [row.draws for row in found.spending] == [10] * 4
    for row in found.spending:
        assert row.objective >= row.first_best * (1 - 1e-9)
        if scheme == "prior-independent":
            assert row.worst_ratio <= 1 + 1e-9
    assert not found.contradicted


def test_complete_information_is_rational_and_says_that_lies_pay():
    found = audit_sampling("complete", draws=8, clients=10)
    assert verdicts(found) == {"truthful": "not claimed", "rational": "holds", "budget_feasible": "holds"}
    assert found.clients_with_gain > 0.9
    # by hand: at cost c everybody who says c_max instead is paid c_max − c more each time
    lie = found.worst
    assert lie.reported > lie.cost
    assert lie.lying_utility > lie.honest_utility
    assert lie.honest_utility == 0


@pytest.mark.parametrize(
    ("cheat", "broken"),
    [
        (PayAsBid, {"truthful"}),
        (Stingy, {"truthful", "rational", "budget_feasible"}),  # the last: by draws of cheap clients
        (Spendthrift, {"budget_feasible"}),
        (TwoFaced, {"truthful", "budget_feasible"}),
        (Forgetful, {"budget_feasible"}),
    ],
)
def test_cheats_are_caught(cheat, broken):
    found = audit_sampling(cheat, draws=40, clients=30)
    caught = {claim.claim for claim in found.contradicted}
    if cheat is Stingy:
        assert {"truthful", "rational"} <= caught <= broken
    else:
        assert broken <= caught
    assert found.to_dict()["contradicted"]


def test_overspending_in_expectation_is_told_from_bad_luck():
    """A scheme that claims its budget on average may exceed it in a draw, but not in the mean of many."""

    class Average(Spendthrift):
        guarantees = OptimalSampling.guarantees

    honest = audit_sampling("optimal", draws=60, clients=30)
    assert verdicts(honest)["budget_feasible"] == "holds"
    assert max(row.worst_ratio for row in honest.spending) > 1.02
    assert verdicts(audit_sampling(Average, draws=60, clients=30))["budget_feasible"] == "contradicted"


def test_the_curve_is_the_worst_clients_utility():
    found = audit_sampling(
        lambda _, __: StepSchedule.truthful(np.array([5.0, 10.0]), np.array([0.8, 0.2])), draws=1, clients=4
    )
    for reported, utility in found.curve:
        q, r = (0.8, 5 + 0.2 * 5 / 0.8) if reported <= 5 else (0.2, 10.0)
        assert utility == pytest.approx(q * (r - found.worst.cost))
    assert {claim.verdict for claim in found.claims} == {"not claimed"}


def test_the_command(tmp_path, capsys, monkeypatch):
    page = tmp_path / "audit.html"
    run_audit("sampling:optimal", None, 8, 6, "quick", 1, True, page)
    read = json.loads(capsys.readouterr().out)
    assert (read["scheme"], read["population"], read["draws"], read["clients"]) == ("optimal", "uniform-costs", 8, 6)
    assert read["reports_per_client"] == 106
    assert read["report"] == str(page)
    text = page.read_text()
    for words in (
        "Every claim it makes survived",
        "no report brings more than the truth",
        "flmarket audit sampling:optimal",
    ):
        assert words in text
    run_audit("sampling:complete", "exponential-costs", 4, None, "strong", 0, False, None)
    out = " ".join(capsys.readouterr().out.split())
    assert "not claimed" in out
    assert "1,050 reports" in out
    (tmp_path / "mine_sampled.py").write_text(
        "from flmarket.sampling import OptimalSampling\n"
        "class Mine:\n"
        "    guarantees = OptimalSampling.guarantees\n"
        "    def __init__(self, distribution, budget):\n"
        "        self.inner = OptimalSampling.from_distribution(distribution, budget)\n"
        "    def offer(self, cost):\n"
        "        q, r = self.inner.offer(cost)\n"
        "        return q, r + 0 * q + 0.5 * cost\n"
    )
    monkeypatch.chdir(tmp_path)
    run_audit("sampling:mine_sampled:Mine", None, 4, None, "quick", 0, False, page)
    assert "contradicted" in capsys.readouterr().out
    assert "did not survive" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("sampling:best", None, 4, None, "quick", 0, True, None), InvalidInput, "prior-independent"),
        (("sampling:optimal", "flm22-iid", 4, None, "quick", 0, True, None), InvalidInput, "uniform-costs"),
        (("sampling:optimal", None, 4, 1, "quick", 0, True, None), InvalidInput, "two clients"),
        (("sampling:optimal", None, 4, None, "slow", 0, True, None), InvalidInput, "strong"),
        (("sampling:no.such:Thing", None, 4, None, "quick", 0, True, None), InvalidInput, "imported"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        run_audit(*arguments)


def test_a_page_must_be_html(tmp_path):
    with pytest.raises(ConfigError, match="html"):
        run_audit("sampling:optimal", None, 4, None, "quick", 0, True, tmp_path / "page.txt")
