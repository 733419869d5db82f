"""A round told from its events, step by step, with the numbers worked by hand."""

import pytest

from flmarket.broker.requests import TaskRequest
from flmarket.broker.web.pages.live import latest_round, lines, make_scene
from flmarket.client import wire

AT = "2026-11-15T23:04:09.000Z"
WINNERS = [
    {"owner": "owner-3", "epsilon": 0.5, "price_micros": 4_000_000},
    {"owner": "owner-7", "epsilon": 1.25, "price_micros": 5_500_000},
]
STORY = [
    ("queued", {"rounds": 2}),
    ("running", {"rounds": 2}),
    ("open", {"round": 0}),
    ("bids", {"round": 0, "bids": 5, "budget_micros": 10_000_000}),
    ("awards", {"round": 0, "awards": 2, "held_micros": 9_500_000, "winners": WINNERS}),
    ("updates", {"round": 0, "delivered": 1, "awards": 2}),
    ("settled", {"round": 0, "delivered": 1, "winners": 2, "spent_micros": 4_000_000, "accuracy": 0.75}),
]
AWARDS = (
    wire.Award(3, "owner-3", 0.5, 10, 1.0, 4_000_000, "posted", "", "t/0/3"),
    wire.Award(7, "owner-7", 1.25, 10, 0.0, 5_500_000, "expired", "deadline passed", "t/0/7"),
)


def told(steps):
    """The events of the story up to a step."""
    return [wire.Progress(i + 1, kind, data, AT) for i, (kind, data) in enumerate(STORY[:steps])]


def scene(steps):
    order = TaskRequest.model_validate({"task": {"name": "t", "rounds": 2, "budget_per_round": 10}}).model_dump(
        mode="json"
    )
    task = wire.Task(
        "t", "p", "t", "running", order, 2, 0, 20_000_000, 0, 0, "privunit", 31, 0.6, None, None, AT, AT, None, AT, ""
    )
    latest = latest_round(told(steps))
    return make_scene(task, latest, AWARDS if latest.settled else ())


@pytest.mark.parametrize(
    ("steps", "states", "parts"),
    [
        (0, ["waiting"] * 4, (0, 0, 0, 10_000_000)),
        (3, ["active", "waiting", "waiting", "waiting"], (0, 0, 0, 10_000_000)),
        (4, ["done", "active", "waiting", "waiting"], (0, 0, 0, 10_000_000)),
        (5, ["done", "done", "active", "waiting"], (0, 9_500_000, 0, 500_000)),
        (6, ["done", "done", "done", "active"], (0, 9_500_000, 0, 500_000)),
        (7, ["done", "done", "done", "done"], (4_000_000, 0, 5_500_000, 500_000)),
    ],
)
def test_each_step_moves_the_stages_and_the_money(steps, states, parts):
    found = scene(steps)
    assert [stage.state for stage in found.stages] == states
    assert tuple(found.parts.values()) == parts
    assert sum(parts) == found.budget_micros
    assert sum(share for share, _ in found.shares) == pytest.approx(1 - parts[3] / 10_000_000)


def test_bids_stay_sealed_until_awards_are_made():
    assert [seat.name for seat in scene(4).seats] == ["Sealed bid"] * 5
    awarded = scene(5).seats
    assert [(seat.name, seat.state) for seat in awarded[:2]] == [("Owner 3", "won"), ("Owner 7", "won")]
    assert (awarded[1].first, awarded[1].second) == ("ε\xa0=\xa01.25", "5.50 held")
    assert [seat.state for seat in awarded[2:]] == ["lost"] * 3
    settled = scene(7).seats
    assert [(seat.state, seat.second) for seat in settled[:2]] == [("posted", "4.00 paid"), ("expired", "money back")]


def test_a_crowd_is_counted_and_not_drawn(monkeypatch):
    monkeypatch.setattr("flmarket.broker.web.pages.live._SEATS", 3)
    found = scene(5)
    assert (len(found.seats), found.left_out) == (3, 2)


def test_the_log_tells_the_story_in_order():
    assert [text for _, text in lines(told(7))] == [
        "Posted: 2 rounds, the whole budget in escrow.",
        "The first round begins.",
        "Round 1: 5 sealed bids for 10.00.",
        "Round 1: 2 bids won, 9.50 into escrow.",
        "Round 1: 1 of 2 updates arrived.",
        "Round 1 settled: 4.00 paid; accuracy 0.750.",
    ]
    ended = wire.Progress(9, "failed", {"refunded_micros": 6_000_000, "error": "no data"}, AT)
    assert [text for _, text in lines([ended])] == ["The task failed: no data; 6.00 went back to the buyer."]


def test_a_new_round_replaces_the_old():
    later = [*told(7), wire.Progress(8, "open", {"round": 1}, AT)]
    latest = latest_round(later)
    assert (latest.index, latest.settled) == (1, False)
