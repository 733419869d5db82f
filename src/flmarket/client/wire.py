"""What the API says, in one place: the broker's routes and pages return these values, and the client reads them back.

Plain frozen dataclasses, so that a client needs nothing of the service; times are RFC 3339, money is in micro-units,
every ε is per round unless its name says total. A `loss` is a privacy loss and its kind, for
`flmarket.privacy.event_from_dict`: a pure ε, ρ, ε at a δ, Gaussian noise, or "unprotected". What a caller may send is
for the broker to judge (`broker.requests`).
What would break it: a field that changes its meaning. New fields may come; a client ignores those it does not know.
"""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
ENDED = ("finished", "cancelled", "expired", "failed")  # states of a task in which nothing more happens

# --- owners' reputation -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reputation:
    """How reliably an owner delivers: `delivered` of the last `ended` awards, `window` at most, that were paid or not;
    those still in escrow are not counted."""

    delivered: int
    ended: int
    window: int
    words: str


# --- tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlowerRun:
    """How the run of a Flower task is. `state`: working (the only one in which rounds are played), lonely (too few
    owners' nodes are connected), starting, waiting, silent, broken, unreachable (the SuperLink starts no run).

    `nodes` of `owners` who have one were connected when the run last looked. `detail` is for the operator.
    """

    task_id: str
    state: str
    words: str
    run_id: str
    tries: int
    owners: int
    nodes: int | None
    detail: str = ""

    @property
    def at_work(self) -> bool:
        """Whether rounds are played."""
        return self.state == "working"


@dataclass(frozen=True)
class EvaluationSet:
    """Records of a buyer's own that models are tested on: with the columns of `data`, or those of its `schema`."""

    id: str
    name: str
    data: str
    schema: dict[str, Any] | None
    examples: int
    sha256: str
    created_at: str


@dataclass(frozen=True)
class RunNode:
    """An owner with a SuperNode, and whether a run saw it connected when it last looked (None: nobody has looked)."""

    party_id: str
    name: str
    owner_number: int
    node_id: str
    connected: bool | None


@dataclass(frozen=True)
class RunDetail:
    """A Flower task's latest run, for the operator: `run` is None once the task has ended; `said` are the last lines of
    the command that asked Flower for it, `error` why the run ended if that was not in order."""

    task_id: str
    task_name: str
    task_state: str
    run: FlowerRun | None
    attempt: int
    run_id: str
    asked_at: str | None
    error: str
    nodes: tuple[RunNode, ...]
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A buyer's task. `request` is the order as it was posted: the sections of a market file, and how it is played.

    `test_examples` is how many examples its accuracy was measured on; `run` says how a Flower task's run is while the
    task is under way.
    """

    id: str
    buyer_id: str
    name: str
    state: str
    request: dict[str, Any]
    rounds: int
    rounds_done: int
    escrow_micros: int
    spent_micros: int
    refunded_micros: int
    perturbation: str
    dimension: int
    baseline_accuracy: float
    accuracy: float | None
    error_bound: float | None
    created_at: str
    started_at: str | None
    finished_at: str | None
    deadline_at: str
    error: str
    run: FlowerRun | None = None
    test_examples: int | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ENDED

    @property
    def margin(self) -> float:
        """By how much the accuracy must exceed that of always answering the larger class before luck is ruled out: the
        one-sided 5 % test of a share of `test_examples` (normal approximation, 1.645 standard deviations)."""
        share = self.baseline_accuracy
        return 1.645 * (share * (1 - share) / self.test_examples) ** 0.5 if self.test_examples else 0.0

    @property
    def better_than_guessing(self) -> bool | None:
        """Whether the model is better than always answering the larger class, luck aside; None if nobody knows yet."""
        return None if self.accuracy is None else self.accuracy > self.baseline_accuracy + self.margin


@dataclass(frozen=True)
class Round:
    """One round. States: open (bids taken), awarded (prices in escrow), settled, empty (nobody sold).

    `budget_micros` is what the round could cost as it was planned. Where awards run over all rounds that is the whole
    task, and everything is spent in the last round.
    """

    index: int
    state: str
    bids: int
    winners: int
    delivered: int
    budget_micros: int
    spent_micros: int
    error_bound: float | None
    accuracy: float | None
    balanced_accuracy: float | None
    loss: float | None
    opened_at: str
    closed_at: str | None


@dataclass(frozen=True)
class Award:
    """One winner of a round. To a buyer `owner` is a name that is good in this task only; her place (`slot`) and why
    an award was voided are for the operator.

    `loss` is of this round, or in total where awards run over all rounds (then they are listed in the round in which
    they ended). `epsilon` is the same as one number: pure, or at δ = 1e-5 where there is no pure one; None if nothing
    bounds it. `dispute` is the state of the one about it, open or decided, if there is one."""

    slot: int | None
    owner: str
    epsilon: float | None
    records: float
    weight: float
    price_micros: int
    state: str
    reason: str
    award_id: str
    loss: dict[str, Any] = field(default_factory=dict)
    reputation: Reputation | None = None
    dispute: str = ""


@dataclass(frozen=True)
class RoundDetail:
    """A round with some of its awards; `next` is where to go on (`start`), if there are more."""

    round: Round
    awards: tuple[Award, ...]
    next: int | None = None


@dataclass(frozen=True)
class BillLine:
    """One round on the bill; `budget_micros` is as in `Round`."""

    index: int
    budget_micros: int
    spent_micros: int
    deliveries: int


@dataclass(frozen=True)
class Bill:
    """Escrow = spent + refunded + left, to the micro-unit. Of what is left, `disputed_micros` are frozen until disputes
    about rounds that are over are decided. `credited_micros` is what the operator gave of her own after disputes,
    beside the escrow."""

    task_id: str
    name: str
    state: str
    escrow_micros: int
    spent_micros: int
    refunded_micros: int
    left_micros: int
    lines: tuple[BillLine, ...]
    disputed_micros: int = 0
    credited_micros: int = 0


@dataclass(frozen=True)
class Receipt:
    """An award's entries in the ledger's log with proofs; `document` can be checked without the broker.

    An owner's is a `flmarket.ledger.Receipt`, a buyer's a `flmarket.ledger.SealedReceipt`. `epsilon` as in `Award`.
    """

    award_id: str
    state: str
    epsilon: float | None
    price_micros: int
    document: dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """Something that happened in a task; `id` grows."""

    id: int
    kind: str
    data: dict[str, Any]
    at: str = ""


# --- parties ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Party:
    """Somebody who may sign in. Owners in Flower tasks have a SuperNode, and a number that their `owner.toml` names.
    `iban`: where payouts go."""

    id: str
    role: str
    name: str
    active: bool
    created_at: str
    node_id: str | None
    owner_number: int | None
    iban: str | None = None


@dataclass(frozen=True)
class PartyPage:
    """Some parties; `next` is the cursor of the following page, `total` how many match in all; owners' reputations by
    their ids."""

    items: tuple[Party, ...]
    next: str | None
    total: int = 0
    reputations: dict[str, Reputation] = field(default_factory=dict)


@dataclass(frozen=True)
class Key:
    """An API key without its secret."""

    id: str
    label: str
    created_at: str
    revoked_at: str | None


@dataclass(frozen=True)
class NewKey:
    """A fresh key, shown this once."""

    id: str
    label: str
    key: str


@dataclass(frozen=True)
class Session:
    """A signed-in browser: send `csrf` as the header X-CSRF-Token with every write."""

    party: Party
    csrf: str
    expires_at: str
    rights: str = "admin"


@dataclass(frozen=True)
class OpenSession:
    """A browser that is signed in: since when, until when, `how` (key, link, single sign-on) and as whom."""

    id: str
    user: str
    how: str
    created_at: str
    expires_at: str
    current: bool


@dataclass(frozen=True)
class User:
    """A person of a party. `rights`: admin, member or viewer; `known` once she has signed in."""

    id: str
    name: str
    email: str
    rights: str
    known: bool
    created_at: str


@dataclass(frozen=True)
class Hook:
    """Whom to tell of what: `kind` webhook or email. `failing` is why the latest attempt failed, if it did."""

    id: str
    kind: str
    address: str
    events: tuple[str, ...]
    created_at: str
    failing: str


@dataclass(frozen=True)
class NewHook:
    """A fresh hook; with the `secret`, a webhook's receiver checks signatures (`flmarket.client.webhooks`)."""

    hook: Hook
    secret: str


@dataclass(frozen=True)
class Notice:
    """Something told to a hook: waiting, sent or given up after `tries` attempts."""

    id: str
    hook_id: str
    event: str
    state: str
    tries: int
    error: str
    at: str
    sent_at: str | None


@dataclass(frozen=True)
class Account:
    """A party's money: what she holds, and what her tasks have in escrow: those under way, and awards in dispute."""

    account: str
    balance_micros: int
    escrow_micros: int


# --- disputes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dispute:
    """Somebody does not agree with one award. `opened_by`: owner or buyer. While `state` is open an award whose
    `award_state` is pending is frozen in escrow; `decision` (pay, refund) says who gets the price in the end.

    `credited_micros` is what the operator gave of her own, because the award had ended before. `reason` is for whoever
    wrote it and the operator, `note` for both sides; `words` say what has become of the price.
    """

    id: str
    award_id: str
    task_id: str
    task_name: str
    index: int
    owner: str
    opened_by: str
    mine: bool
    reason: str
    state: str
    price_micros: int
    award_state: str
    award_reason: str
    decision: str
    note: str
    credited_micros: int
    opened_at: str
    decided_at: str | None
    words: str


@dataclass(frozen=True)
class DisputePage:
    """Some disputes, newest first; `undecided` is how many are open in all."""

    items: tuple[Dispute, ...]
    next: str | None
    undecided: int = 0


# --- owners -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bid:
    """An owner's standing bid; `terms` is the hash of the task's terms that she accepted with it."""

    task_id: str
    slot: int
    kind: str
    rate: float | None
    grid: tuple[float, ...] | None
    values: tuple[float, ...] | None
    privacy_budget: float
    data_size: int
    placed_at: str
    active: bool
    terms: str | None = None


@dataclass(frozen=True)
class Offer:
    """A task as owners see it: what is asked, what is paid at most, and their own place and bid in it.

    `place` says where records and noise are.
    """

    task_id: str
    name: str
    state: str
    place: str
    data: str
    auction: str
    truthful: str
    aggregation: str
    perturbation: str
    dimension: int
    rounds: int
    rounds_done: int
    budget_micros_per_round: int
    bidders_per_round: int
    places_free: int
    deadline_at: str
    slot: int | None
    records: int | None
    bid: Bid | None
    terms_hash: str = ""
    trust: str = "local"


@dataclass(frozen=True)
class Privacy:
    """An owner's privacy over her lifetime: total ε spent, cap and what is left.

    `unit` is what it is for: her whole updates ("update"), or any one record of hers ("record"), then at `delta`.
    """

    cap_epsilon_total: float
    spent_epsilon_total: float
    left_epsilon_total: float
    words: str
    unit: str = "update"
    delta: float = 0.0


@dataclass(frozen=True)
class Release:
    """One award of an owner; `epsilon` is of this round, `epsilon_total` of all her releases in the list up to it.

    `place` says where records and noise are in this task.
    """

    task_id: str
    task_name: str
    place: str
    index: int
    epsilon: float
    epsilon_total: float
    records: float
    price_micros: int
    paid_micros: int
    state: str
    reason: str
    award_id: str
    at: str
    dispute: str = ""


@dataclass(frozen=True)
class Held:
    """An award of an owner whose price is in escrow while its round is played; `dispute` as in `Award`."""

    award_id: str
    task_id: str
    task_name: str
    index: int
    price_micros: int
    dispute: str


@dataclass(frozen=True)
class Statement:
    """What an owner sold and earned in all, and some of her awards; `next` is where to go on (`start`), if there are
    more. `credited_micros` is what the operator gave her of her own after disputes, beside what she earned; `held` are
    awards of rounds under way."""

    party: Party
    privacy: Privacy
    earned_micros: int
    awards: int
    deliveries: int
    releases: tuple[Release, ...]
    next: int | None = None
    reputation: Reputation | None = None
    credited_micros: int = 0
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class EpsilonWords:
    """What an ε means, for people: how much surer a suspicion can become."""

    epsilon: float
    odds_factor: float
    certainty_from_half: float
    words: str


@dataclass(frozen=True)
class BidAdvice:
    """What a bid would have earned on a population, a round; and over `rounds` of them, no further than her cap goes.

    `epsilon` is about everything she will have given up at most then, in total: what she gave up before included.
    `rounds_paid_most` is how many of the rounds her cap lets her be paid for, `expected_payment_micros_total` what they
    bring together.
    """

    auction: str
    population: str
    profiles: int
    wins: float
    mean_epsilon_if_won: float
    mean_payment_micros_if_won: int
    mean_cost_micros_if_won: int
    mean_payment_micros: int
    truthful: str
    rounds: int
    rounds_paid_most: int
    expected_payment_micros_total: int
    spent_epsilon_total: float
    left_epsilon_total: float
    epsilon: EpsilonWords
    words: str

    @property
    def epsilon_words(self) -> str:
        """What all that she gave up means with it."""
        return self.epsilon.words


# --- the market -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MarketTask:
    """What everybody may know of a task; `place` says where records and noise are.

    `auction` is "" in kinds without one. `budget_micros_total` is what it may cost in all; there is none a round where
    awards run over all rounds.
    """

    id: str
    name: str
    state: str
    place: str
    data: str
    auction: str
    aggregation: str
    perturbation: str
    rounds: int
    rounds_done: int
    budget_micros_per_round: int | None
    owners: int
    open: bool
    mine: bool
    kind: str = "auction"
    budget_micros_total: int = 0
    run: FlowerRun | None = None
    trust: str = "local"


@dataclass(frozen=True)
class Listing:
    """A task for everybody: its terms, the hash that stands for them, and how far it has come.

    `terms` is a document that never changes; `GET /listings/{id}/terms` has its text, whose SHA-256 is `terms_hash`.
    `rounds_delivered` of the last `rounds_looked_at` (20 at most) brought every update that was awarded.
    `epsilon_most_total` is the most that one owner has given up in this task, added up; None if nothing bounds it.
    `agrees`: bills, statements and ledger did when they were last compared (`reconciled_at`), `receipts` of them here.
    """

    id: str
    name: str
    state: str
    terms: dict[str, Any]
    terms_hash: str
    mine: bool
    open: bool
    places_free: int
    rounds: int
    rounds_done: int
    escrow_micros: int
    locked_micros: int
    rounds_looked_at: int
    rounds_delivered: int
    updates_awarded: int
    updates_delivered: int
    epsilon_most_total: float | None
    receipts: int
    reconciled_at: str | None
    agrees: bool
    deadline_at: str
    run: FlowerRun | None = None


@dataclass(frozen=True)
class Market:
    """The market at a glance. Of all `releases`, `releases_simulated` were made by the broker in owners' stead; `total`
    is how many tasks there are, or match, of which `tasks` are some."""

    tasks: tuple[MarketTask, ...]
    tasks_running: int
    tasks_finished: int
    rounds_settled: int
    paid_micros: int
    releases: int
    releases_simulated: int
    owners: int
    total: int = 0


@dataclass(frozen=True)
class Mechanism:
    """An auction and what it claims."""

    name: str
    truthful: str
    rational: str
    budget_feasible: str
    source: str
    assumes: str


@dataclass(frozen=True)
class KindLine:
    """A kind of market, in a line; `lasting`: its awards run over all rounds, and are paid after the last."""

    name: str
    about: str
    lasting: bool


@dataclass(frozen=True)
class Catalogue:
    """The names that a task may use."""

    auctions: tuple[Mechanism, ...]
    aggregations: tuple[str, ...]
    perturbations: tuple[str, ...]
    populations: tuple[str, ...]
    data_sets: tuple[str, ...]
    models: tuple[str, ...]
    kinds: tuple[KindLine, ...] = ()


@dataclass(frozen=True)
class BudgetPoint:
    """What one budget a round buys on average over drawn rounds of this task's owners."""

    budget_micros: int
    error_bound: float | None
    spent_micros: int
    winners: float
    mean_epsilon: float
    failed: str
    accuracy: float | None
    # the error bound in the papers' noise over the second-best estimate, for those who ask
    over_second_best: float | None = None


@dataclass(frozen=True)
class Exploration:
    """Budgets compared, from the mechanism's own model."""

    auction: str
    aggregation: str
    perturbation: str
    dimension: int
    bidders: int
    profiles: int
    full_cost_micros: int
    baseline_accuracy: float
    points: tuple[BudgetPoint, ...]


# --- the operator -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Payout:
    """Money on its way out. States: new, booked (withdrawn in the ledger under this id), sent, failed (still to be
    sent; `note` says why)."""

    id: str
    party_id: str
    name: str
    role: str
    amount_micros: int
    currency: str
    state: str
    reference: str
    note: str
    created_at: str
    sent_at: str | None
    iban: str | None = None


@dataclass(frozen=True)
class LogLine:
    """One line of the audit log; `party` and `about` are the names that go with `party_id` and `target`, `person` is
    who of the party it was, if she signed in as herself."""

    id: int
    at: str
    party_id: str | None
    action: str
    target: str
    outcome: str
    detail: str
    party: str = ""
    about: str = ""
    person: str = ""


@dataclass(frozen=True)
class Finding:
    """Something in which the broker's rows and the ledger do not agree."""

    rule: str
    subject: str
    message: str


@dataclass(frozen=True)
class Alert:
    """Something that the operator should look at: in words, and on which page."""

    text: str
    path: str


@dataclass(frozen=True)
class Operations:
    """The service at a glance; `findings` are those of the standing check at `reconciled_at`, `alerts` what somebody
    has to see to."""

    tasks: dict[str, int]
    audits: dict[str, int]
    parties: dict[str, int]
    next_round_in_seconds: float | None
    oldest_waiting_seconds: float | None
    worker: str | None
    worker_alive: bool
    database: str
    escrow_micros: int
    ledger_entries: int
    reconciled_at: str | None
    findings: tuple[Finding, ...]
    runs: tuple[FlowerRun, ...] = ()
    alerts: tuple[Alert, ...] = ()
    locked_micros: int = 0  # in all tasks under way, `escrow_micros` of it for awards not yet resolved


@dataclass(frozen=True)
class LedgerCheck:
    """What a replay of the whole log found, and whether bills and statements follow from it; `root` commits to it."""

    ok: bool
    message: str
    entries: int
    root: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class LedgerHead:
    """A commitment to the whole log."""

    entries: int
    last: str
    root: str


@dataclass(frozen=True)
class LedgerEntry:
    """One entry of the ledger's log."""

    seq: int
    at: str
    kind: str
    ref: str
    debit: str | None
    credit: str | None
    amount_micros: int
    owner: str | None
    hash: str


# --- audits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """One claim of a mechanism and what the audit found."""

    claim: str
    level: str
    verdict: str
    evidence: str


@dataclass(frozen=True)
class Audit:
    """A run of the auditor. `report` is the whole report once the state is done."""

    id: str
    state: str
    auction: str
    population: str
    profiles: int
    seed: int
    progress: float
    note: str
    created_at: str
    finished_at: str | None
    claims: tuple[Claim, ...]
    report: dict[str, Any] | None


# --- several of one thing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Items(Generic[T]):
    """All that there are, or the latest."""

    items: tuple[T, ...]


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some of them; `next` says where the following page begins, if there is one."""

    items: tuple[T, ...]
    next: str | int | None = None


EvaluationPage = Items[EvaluationSet]
TaskPage = Page[Task]
RoundPage = Page[Round]
ReceiptPage = Page[Receipt]
KeyPage = Items[Key]
SessionPage = Items[OpenSession]
UserPage = Items[User]
HookPage = Items[Hook]
NoticePage = Items[Notice]
OfferPage = Page[Offer]
PayoutPage = Page[Payout]
LogPage = Page[LogLine]
LedgerPage = Page[LedgerEntry]
AuditPage = Items[Audit]

# --- refusals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldProblem:
    """One field that is not accepted."""

    field: str
    problem: str


@dataclass(frozen=True)
class Problem:
    """What went wrong (RFC 9457)."""

    title: str
    status: int
    detail: str
    errors: tuple[FieldProblem, ...] = ()
    type: str = "about:blank"
