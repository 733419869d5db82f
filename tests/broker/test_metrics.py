"""What /metrics counts is what tables and ledger say, and every figure of the dashboard is exported."""

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.office import offers, statements, tasks
from flmarket.broker.requests import TaskRequest
from flmarket.broker.settings import Settings
from flmarket.broker.tables import RoundRow, TaskRow
from flmarket.broker.work.flower.runs import FlowerRuns
from flmarket.broker.work.rounds import SqlStore, play_round
from flmarket.broker.work.worker import StandingCheck, Worker
from flmarket.ledger import AwardState

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json"
# what the query language has of its own
_WORDS = {"by", "on", "le", "sum", "rate", "increase", "time", "clamp_min", "histogram_quantile", "label_values", "max"}


@pytest.fixture
def scrape(serve):
    """All samples of a broker's /metrics by name and labels, as Prometheus reads them."""

    def samples(broker, **headers):
        with serve(create_app(broker=broker)) as address:
            answer = httpx.get(f"{address}/metrics", headers=headers)
        assert answer.status_code == 200, answer.text
        families = text_string_to_metric_families(answer.text)
        return {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}

    return samples


def test_money_epsilon_and_time_are_those_of_the_books(broker, joined, order, cheap_bid, play, scrape):
    buyer, owner = joined(broker, "buyer").party, joined(broker, "owner").party
    statements.set_cap(broker, owner, 1.5)
    task = tasks.post_task(broker, buyer, order(rounds=4, owners={"dropout": 0.3}))
    offers.place_bid(broker, owner, task.id, cheap_bid(1.0))
    play(broker)
    waits = tasks.post_task(broker, buyer, order(rounds=2, simulated=False, minimum_bids=1))
    found = scrape(broker)
    awards = [one for one in broker.books.ledger.awards() if one.epsilon > 0]
    paid = [one for one in awards if one.state is AwardState.POSTED]
    assert found["flmarket_paid_micros_total",] == sum(one.price_micros for one in paid) > 0
    assert found["flmarket_budget_micros_total",] == 4 * 100_000_000
    assert found["flmarket_epsilon_count", "round"] == len(paid) >= 4
    assert found["flmarket_epsilon_sum", "round"] == pytest.approx(sum(one.epsilon for one in paid))
    assert found["flmarket_epsilon_bucket", "1.0", "round"] == sum(one.epsilon <= 1 for one in paid)
    assert found["flmarket_awards_total", "expired"] == sum(one.state is AwardState.EXPIRED for one in awards) > 0
    assert found["flmarket_round_seconds_count",] == 4
    with broker.database.read() as session:
        rows = session.scalars(select(RoundRow)).all()
    assert found["flmarket_round_seconds_sum",] == pytest.approx(sum(r.closed_at - r.opened_at for r in rows) / 1000)
    assert found["flmarket_step_seconds_count", "settled"] == 4
    assert found["flmarket_unbounded_awards_total",] == 0
    assert (found["flmarket_tasks", "finished"], found["flmarket_tasks", "queued"]) == (1, 1)
    assert found["flmarket_escrow_micros",] == broker.books.ledger.balance(waits.id) == 200_000_000
    tasks.cancel_task(broker, buyer, waits.id)
    play(broker)
    found = scrape(broker)
    assert (found["flmarket_tasks", "cancelled"], found["flmarket_tasks", "queued"]) == (1, 0)  # not what it was
    assert found["flmarket_escrow_micros",] == 0


REWARD = {"kind": "reward", "task": {"name": "t", "rounds": 2, "learning_rate": 0.2}, "reward": {"reward": 5.0}}
SAMPLING = {
    "kind": "sampling", "task": {"name": "t", "rounds": 2, "budget_per_round": 6.0},
    "sampling": {"costs": [1.0, 4.0], "hard_cap": 12.0, "first_rate": 0.2},
}  # fmt: skip


@pytest.mark.parametrize("wanted", [REWARD, SAMPLING], ids=["over all rounds", "without a bound"])
def test_losses_that_are_no_epsilon_of_a_round_are_told_apart(wanted, small, joined, play, scrape):
    order = {**wanted, "data": {"name": "breast-cancer", "owners": 4, "partition": "equal"}}
    task = tasks.post_task(small, joined(small, "buyer").party, TaskRequest.model_validate(order))
    play(small)
    found, made = scrape(small), [one for one in small.books.ledger.awards() if one.buyer == task.id]
    paid = [one for one in made if one.state is AwardState.POSTED and not one.id.endswith("/refund")]
    lasting = wanted is REWARD
    assert found["flmarket_awards_total", "posted"] == len(paid) > 0
    assert found.get(("flmarket_epsilon_count", "task"), 0) == (len(paid) if lasting else 0)
    assert found["flmarket_unbounded_awards_total",] == (0 if lasting else len(paid))
    assert not found.get(("flmarket_epsilon_count", "round"))
    assert found["flmarket_paid_micros_total",] == sum(one.price_micros for one in paid) > 0


def test_a_round_is_counted_once(small, joined, order, scrape, monkeypatch):
    """Also one that is written again after a crash, and those that a Flower run settles elsewhere."""
    save = SqlStore.save_round

    def twice(self, record, checkpoint):
        save(self, record, checkpoint)
        save(self, record, checkpoint)

    monkeypatch.setattr(SqlStore, "save_round", twice)
    task = tasks.post_task(small, joined(small, "buyer").party, order(rounds=2))
    list(play_round(small, task.id))
    before = scrape(small)
    assert before["flmarket_rounds_total", "settled"] == before["flmarket_round_seconds_count",] == 1
    other = Broker.open(small.settings)  # a worker that sees to runs: its counters know nothing of this round yet
    runs = FlowerRuns(other)
    runs._seen[task.id] = 0
    for _ in range(2):
        with other.database.read() as session:
            runs._count(session, session.get_one(TaskRow, task.id))
    after = scrape(other)
    names = ("rounds_total", "paid_micros_total", "epsilon_sum", "epsilon_count", "round_seconds_sum", "awards_total")
    for key in before:
        if key[0].removeprefix("flmarket_") in names:
            assert after[key] == pytest.approx(before[key]), key
    other.close()


def test_a_round_that_is_given_up_counts_what_was_paid(small, joined, order, scrape):
    buyer = joined(small, "buyer").party
    task = tasks.post_task(small, buyer, order(rounds=2))
    steps = play_round(small, task.id)
    assert [next(steps) for _ in range(3)] == ["open", "bids", "awards"]
    steps.close()
    Worker(small)._fail(task.id, "broken")
    found, made = scrape(small), [one for one in small.books.ledger.awards() if f"{task.id}/0/" in one.id]
    assert found["flmarket_rounds_total", "void"] == 1
    assert found["flmarket_awards_total", "voided"] == len(made) > 0
    assert found["flmarket_paid_micros_total",] == 0


def test_the_books_are_told(small, joined, order, play, scrape):
    buyer = joined(small, "buyer").party
    task = tasks.post_task(small, buyer, order(rounds=1))
    assert scrape(small)["flmarket_books_compared_seconds",] == 0
    play(small)
    with small.database.write() as session:  # somebody's hand in the till
        session.get_one(TaskRow, task.id).spent_micros += 1
    StandingCheck(small, None, None).run()
    found = scrape(small)
    assert found["flmarket_books_findings",] > 0
    assert found["flmarket_books_compared_seconds",] > 1.7e9


def test_a_token_keeps_strangers_from_the_figures(tmp_path, scrape, serve):
    settings = Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False, metrics_token="gläsern-9")
    assert "gläsern" not in repr(settings)
    broker = Broker.open(settings)
    with serve(create_app(broker=broker)) as address:
        for header in (None, "Bearer gläsern", "gläsern-9", "Bearer", "Bearer gläsern-9x"):
            sent = {} if header is None else {"Authorization": header.encode()}
            answer = httpx.get(f"{address}/metrics", headers=sent)
            assert (answer.status_code, "flmarket_" in answer.text) == (401, False), header
        assert httpx.get(f"{address}/healthz").status_code == 200
        right = httpx.get(f"{address}/metrics", headers={"Authorization": "Bearer gläsern-9".encode()})
        assert "flmarket_tasks" in right.text
    broker.close()


def named(dashboard):
    """Every query of a dashboard, and the metrics that it names."""
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    for title, query in queries:
        bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\$\w+', " ", query)
        bare = re.sub(r"\b(?:by|on)\s*\([^)]*\)", " ", bare)
        yield title, query, set(re.findall(r"(?<![\w.])[A-Za-z_:][\w:]*", bare)) - _WORDS


def missing(dashboard, exported):
    return [(title, name) for title, _, names in named(dashboard) for name in sorted(names - exported)]


def test_the_dashboard_shows_what_is_exported(small, joined, order, play, scrape):
    buyer = joined(small, "buyer").party
    tasks.post_task(small, buyer, order(rounds=1, owners={"dropout": 0.3}))
    play(small)
    small.metrics.notices.labels("webhook", "sent").inc()
    exported = {key[0] for _ in range(2) for key in scrape(small)}  # the first request is counted by the second
    dashboard = json.loads(DASHBOARD.read_text())
    assert missing(dashboard, exported) == []
    used = {name for _, _, names in named(dashboard) for name in names}
    assert {"flmarket_epsilon_bucket", "flmarket_paid_micros_total", "flmarket_round_seconds_bucket"} <= used
    ours = {re.sub(r"_(bucket|sum|count|created)$", "", one) for one in exported if one.startswith("flmarket_")}
    ours -= {one for one in ours if f"{one}_created" in exported and f"{one}_total" in exported}
    assert ours == {re.sub(r"_(bucket|sum|count)$", "", one) for one in used}  # and nothing is left out
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    labels = {"le", "route", "status", "state", "outcome", "step", "kind", "per"}
    for title, query, _ in named(dashboard):
        assert query.count("(") == query.count(")"), title
        for group in re.findall(r"\bby\s*\(([^)]*)\)", query):
            assert {one.strip() for one in group.split(",")} <= labels, title
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${source}"
    planted = json.loads(DASHBOARD.read_text().replace("flmarket_paid_micros_total", "flmarket_payed_micros_total"))
    assert {name for _, name in missing(planted, exported)} == {"flmarket_payed_micros_total"}
