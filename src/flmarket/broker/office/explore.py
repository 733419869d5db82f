"""Before money moves: what budgets buy (for buyers) and what a bid would earn (for owners), by the mechanism itself.

The budget explorer draws rounds of the very owners that the task would have, runs its auction on them at each budget
and reports the error bound that its aggregation would reach: the mechanism's own model, no curve fitting. Accuracy,
if asked for, comes from playing the task's first rounds in memory; it stops when its time is up. How far
the auction is from the second best is told on request too: the error bound in the papers' noise over what a buyer would
reach who knows the law that these owners' rates are drawn from, and that honesty must be paid for (`flmarket.audit`).
"""

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flmarket import auctions, populations
from flmarket.aggregation import error_bound
from flmarket.audit import over_second_best, second_best
from flmarket.audit.yardsticks import RateLaw, optimal_bound
from flmarket.bids import BidProfile, Valuations
from flmarket.broker.core import Broker, Party, require
from flmarket.broker.office.evaluations import check_set
from flmarket.broker.office.offers import as_profile
from flmarket.broker.office.statements import epsilon_words
from flmarket.broker.requests import BidHelpRequest, ExploreRequest, check_playable
from flmarket.client import wire
from flmarket.engines import Simulation
from flmarket.errors import FlmarketError, InvalidInput
from flmarket.learning import dimension
from flmarket.ledger import MICROS
from flmarket.market.owner import LEAST_EPSILON
from flmarket.sampling.distributions import Uniform

_TRIAL_ROUNDS, _TRIAL_SECONDS = 25, 6.0
_YARDSTICK = 400  # bids, at most: it takes a second or two
_MOST_BIDS = 4000
_ADVICE = {
    True: "Bidding what your privacy is really worth to you is your best bid here.",
    False: "This auction does not promise that an honest bid is your best one.",
}


def explore(broker: Broker, party: Party, request: ExploreRequest) -> wire.Exploration:
    """What different budgets would buy, before a task is posted: error bound, spending and winners at each. Nothing is
    posted and nothing is paid. A party has one under way and one that waits; more are refused (429)."""
    require(party, "buyer")
    check_playable(broker.settings, request.task)
    check_set(broker, party, request.task)
    simulation = broker.simulations.build("explore", request.task)
    if not isinstance(simulation, Simulation):
        raise InvalidInput("task.kind", request.task.kind, "auction: other kinds have nothing to compare by budget")
    size = dimension(simulation.trained)
    rng = np.random.default_rng(request.task.seed)
    bidders = min(request.task.task.bidders_per_round, simulation.bids.n)
    profiles = max(1, min(request.profiles, _MOST_BIDS // bidders))  # so that no request costs more than a second or so
    drawn = [np.sort(rng.permutation(simulation.bids.n)[:bidders]) for _ in range(profiles)]
    bids = simulation.bids[np.stack(drawn)]
    until = time.monotonic() + _TRIAL_SECONDS
    points = []
    for budget in sorted(set(request.budgets_micros)):
        point = _point(simulation, bids, budget, size)
        if request.accuracy and not point.failed and time.monotonic() < until:
            point = replace(point, accuracy=_trial(simulation, budget))
        points.append(point)
    low, high = request.task.owners.rate
    if request.second_best and low < high:
        points = _held_against(simulation, bids, points, Uniform(low, high))
    names = simulation.auction.name, simulation.aggregation.name, simulation.perturbation.name
    full_cost, baseline = int(bids.full_cost.sum(axis=-1).mean() * MICROS), simulation.data.baseline_accuracy
    return wire.Exploration(*names, size, bidders, profiles, full_cost, baseline, tuple(points))


def bid_help(broker: Broker, party: Party, request: BidHelpRequest) -> wire.BidAdvice:
    """What a bid would earn among owners drawn from a population, as far as her lifetime cap lets her sell, and what
    its ε means on top of all that she gave up before. Nothing is placed."""
    require(party, "owner")
    cap, spent = broker.books.privacy(party.id, "update")
    left = max(0.0, (cap or 0.0) - spent)
    limit = min(request.bid.privacy_budget, left)  # her bids are cut to what her account allows
    auction = auctions.get(request.auction)
    share = pay = paid_cost = mean_pay = mean_epsilon = 0.0
    if limit >= LEAST_EPSILON:
        rng = np.random.default_rng(0)
        others = populations.get(request.population).sample(rng, request.profiles)
        size = request.bid.data_size or max(1, int(np.median(others.data_size)))
        bids = _beside(as_profile(request.bid.valuation, limit, size), others)
        outcome = auction.run(bids, request.budget_factor * others.full_cost.sum(axis=-1), rng=rng)
        payment, won = outcome.payment[:, 0], outcome.epsilon[:, 0] > 0
        share, mean_pay, pay = float(won.mean()), float(payment.mean()), _mean(payment[won])
        paid_cost, mean_epsilon = _mean(bids.cost_of(outcome)[won, 0]), _mean(outcome.epsilon[won, 0])
    else:
        limit = 0.0
    paid_most = min(request.rounds, int(left / mean_epsilon * (1 + 1e-9))) if mean_epsilon else 0
    total = min(request.rounds * share, float(paid_most)) * pay
    truthful = str(auction.guarantees.truthful)
    if cap is None:
        words = (
            "You have no cap for whole updates, so you can sell none: a party sells either updates or records’ privacy."
        )
    elif left < LEAST_EPSILON:
        words = (
            f"Your cap is reached (ε = {spent:.4g} spent in total): you can sell nothing and are paid nothing, "
            f"whatever you bid."
        )
    elif share == 0:
        words = "This bid would not have won a single round: it asks for more than what others sell for."
    else:
        words = (
            f"It would win {share:.0%} of rounds, selling ε = {mean_epsilon:.3g} and earning {pay:.4g} each time; "
            f"by your own valuation that privacy is worth {paid_cost:.4g} to you. Of {request.rounds} round(s), your "
            f"cap lets you be paid for {paid_most} at most: about {total:.4g} in all. {_ADVICE[truthful == 'exact']}"
        )
    return wire.BidAdvice(
        auction.name,
        request.population,
        request.profiles,
        share,
        mean_epsilon,
        int(pay * MICROS),
        int(paid_cost * MICROS),
        int(mean_pay * MICROS),
        truthful,
        request.rounds,
        paid_most,
        int(total * MICROS),
        spent,
        left,
        epsilon_words(min(spent + request.rounds * limit, spent + left)),
        words,
    )


def _point(simulation: Simulation, bids: BidProfile, budget: int, dimension: int) -> wire.BudgetPoint:
    try:
        outcome = simulation.auction.run(bids, budget / MICROS, rng=np.random.default_rng(0))
        spent = outcome.payment.sum(axis=-1)
        if (spent > budget / MICROS * (1 + 1e-9)).any():
            return wire.BudgetPoint(budget, None, 0, 0.0, 0.0, "the mechanism would overspend this budget", None)
        sells = outcome.winners.any(axis=-1)
        bound = None
        if sells.any():
            sold = bids.data_size if outcome.records is None else np.floor(outcome.records)
            epsilon, size = outcome.epsilon[sells], sold[sells]
            weights = simulation.aggregation.weights(epsilon, size)
            clip, noise = simulation.perturbation.clip, simulation.perturbation
            bounds = error_bound(weights, epsilon, size, clip=clip, dimension=dimension, perturbation=noise)
            bound = float(np.mean(bounds)) if np.isfinite(bounds).all() else None
    except FlmarketError as error:
        return wire.BudgetPoint(budget, None, 0, 0.0, 0.0, str(error), None)
    won = outcome.epsilon[outcome.winners]
    winners = float(outcome.winners.sum(axis=-1).mean())
    return wire.BudgetPoint(budget, bound, int(spent.mean() * MICROS), winners, _mean(won), "", None)


def _held_against(
    simulation: Simulation, bids: BidProfile, points: list[wire.BudgetPoint], law: RateLaw
) -> list[wire.BudgetPoint]:
    """The points that worked, with their distance from the second best; as they were if one profile is too long."""
    works = [point.budget_micros / MICROS for point in points if not point.failed]
    some = bids[: _YARDSTICK // (bids.n * max(len(works), 1))]
    if not works or not len(some.data_size):
        return points
    rows = len(some.data_size)
    many, budget = some[np.tile(np.arange(rows), len(works))], np.repeat(works, rows)
    epsilon = simulation.auction.run(many, budget, rng=np.random.default_rng(0)).epsilon
    reached, estimate = optimal_bound(epsilon, many.data_size), second_best(many, budget, law)[1]
    found = map(over_second_best, reached.reshape(-1, rows), estimate.reshape(-1, rows))
    return [point if point.failed else replace(point, over_second_best=next(found)) for point in points]


def _trial(simulation: Simulation, budget: int) -> float | None:
    rounds = min(simulation.task.rounds, _TRIAL_ROUNDS)
    try:
        result = replace(simulation, task=replace(simulation.task, rounds=rounds, budget_micros=budget)).run()
    except FlmarketError:
        return None
    return float(np.mean(result.accuracy[-3:]))


def _beside(mine: BidProfile, others: BidProfile) -> BidProfile:
    profiles = others.shape[0]
    own = mine.valuations.broadcast_to((profiles, 1))
    return BidProfile(
        Valuations.concatenate([own, others.valuations]),
        np.concatenate([np.full((profiles, 1), mine.privacy_budget[0]), others.privacy_budget], axis=-1),
        np.concatenate([np.full((profiles, 1), mine.data_size[0]), others.data_size], axis=-1),
    )


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else 0.0
