"""Where records and noise are, for which unit an ε is, against whom it holds: the one place for these words.

Pages, reports and commands take them from here, so that none of them claims more than its market does. An ε bounds a
bet: whatever the odds of a suspicion were, seeing releases of total ε multiplies them by at most e^ε (the definition of
differential privacy). An even chance thus becomes at most e^ε / (1 + e^ε); the ε is what all releases add up to, never
that of one round alone. The bound says nothing where the observer holds the records, as a simulation's host does.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TrustWords:
    """Sentences about one kind of market. `place` is short, for a tag; `simulated`: one party holds all records.

    `protects` is the unit in one word, `model` the trust model's name in market files.
    """

    simulated: bool
    place: str
    where: str
    update: str
    unit: str
    against: str
    protects: str = "owner"
    model: str = "local"

    @property
    def text(self) -> str:
        """All of it."""
        return f"{self.where} {self.unit} {self.against}"

    @property
    def badge(self) -> str:
        """Whom one has to trust, in a few words: a simulation is one whatever it simulates."""
        if self.simulated:
            return self.place
        return "on the owner’s machine" if self.model == "local" else "secure aggregation"


_OWNER = "An ε, per round or in total as it says, is for one owner’s whole data set, not for one record."
_HERE = "Here one program holds all records, plays every owner and draws the noise from a seed."
_AGAINST_NOBODY = (
    "It protects nobody’s records from whoever runs this program or knows the seed; it shows what owners would give up "
    "towards a broker and a buyer if each ran it on her own machine."
)

AT_BROKER = TrustWords(
    True,
    "simulated at the broker",
    "Here the broker holds all records, trains for every owner and adds the noise itself, from a seed that the buyer "
    "chose.",
    "trained, clipped and noised by the broker",
    _OWNER,
    "It protects nothing from the broker, nor from a buyer who uses the seed; it counts what the owner would give up "
    "towards both if she ran it on her own machine.",
)
AT_OWNERS = TrustWords(
    False,
    "on owners’ own machines",
    "Records stay on each owner’s own machine; she trains there, clips her update and adds the noise before it leaves.",
    "trained, clipped and noised on owners’ own machines",
    _OWNER,
    "It holds against everybody who sees her updates, broker and buyer included. That she took part, her bid, her "
    "record count and her price it does not hide.",
)
AT_OWNERS_RAW = TrustWords(
    False,
    AT_OWNERS.place,
    "Records stay on each owner’s own machine, and updates leave it as they are, without noise.",
    "trained on owners’ own machines, sent as they are",
    "Nothing is private, for no unit: an update counts as unbounded in the owner’s account, whatever its total was.",
    "It protects records from nobody who sees an update, broker and buyer included.",
    "nobody",
)
_SUM = (
    "It holds against everybody who sees sums, broker, buyer and other owners included, as long as no more owners side "
    "with the broker, and no more drop out, than the market allows for; a single update, behind its mask, is not "
    "private by itself."
)
SUMS_AT_OWNERS = TrustWords(
    False,
    AT_OWNERS.place,
    "Records stay on each owner’s own machine; she trains there, clips her update, adds her share of the noise and "
    "masks both before they leave: only the sum over all owners can be unmasked.",
    "trained, clipped, noised and masked on owners’ own machines; seen as a sum",
    _OWNER,
    f"{_SUM} That she took part, her bid, her record count and her price it does not hide.",
    model="secure-aggregation",
)
OWNERS_HERE = TrustWords(
    True, "simulated on this machine", _HERE, "trained, clipped and noised in the simulation", _OWNER, _AGAINST_NOBODY
)
RECORDS_HERE = replace(
    OWNERS_HERE,
    unit="What is counted is for one record of a user, not for all her data, and in total over all rounds.",
    protects="record",
)
_RECORD = (
    "An ε, per round or in total as it says and at its δ, is for any one record of an owner, not for her whole data "
    "set: what her records have in common is not hidden."
)
AUCTION_RECORDS_HERE = replace(
    OWNERS_HERE, update="trained and noised step by step in the simulation", unit=_RECORD, protects="record"
)
CLIENTS_HERE = replace(
    OWNERS_HERE,
    unit="What is counted is for one client’s whole data set; where it is for one record, it says so. Per round or "
    "total, as it says.",
    protects="client",
)
RAW_HERE = TrustWords(
    True,
    OWNERS_HERE.place,
    "Here one program holds all records and plays every client.",
    "trained in the simulation, sent as they are",
    "Raw updates reach the server in this market: no noise is added, and no privacy is claimed, for no unit.",
    "It protects nobody’s records from the server or the buyer, also where clients run it on their own machines.",
    "nobody",
)
PAPERS_HERE = replace(OWNERS_HERE, unit="An ε or ρ, per round or in total, is for the unit that the paper defines.")
BIDS_ONLY = TrustWords(
    True,
    "bids drawn at random",
    "Here there are no records and no noise.",
    "none",
    "An ε, per round, is the one in an owner’s bid or award, for her whole data set.",
    "Whether noise protects anybody from broker or buyer is not tested.",
)


# Of tasks that are simulated at the broker, where the kind of market says something else than an auction does.
_AT_BROKER = {
    "sampling": replace(
        AT_BROKER,
        where="Here the broker holds all records and trains for every client.",
        update="trained by the broker, sent as they are",
        unit=RAW_HERE.unit,
        against=RAW_HERE.against,
    ),
    "reward": replace(AT_BROKER, unit=RECORDS_HERE.unit, protects="record"),
    "joint": replace(AT_BROKER, unit=CLIENTS_HERE.unit, protects="client"),
}
# And of those that owners play on their own machines.
_AT_OWNERS = {
    "sampling": AT_OWNERS_RAW,
    "reward": replace(AT_OWNERS, unit=RECORDS_HERE.unit, protects="record"),
    "joint": replace(AT_OWNERS, unit=CLIENTS_HERE.unit, protects="client"),
}


def in_sums(words: TrustWords, trust: str) -> TrustWords:
    """A simulation's words, as they are where only sums are seen, if that is the trust model."""
    if trust == "local":
        return words
    update = words.update.replace("clipped and noised", "clipped, noised and summed")
    there = f"{words.against} There: {_SUM[:1].lower()}{_SUM[1:]}"
    return replace(words, update=update, against=there, model=trust)


def sampled_words(trust: str) -> TrustWords:
    """Of clients who are sampled, played here."""
    return RAW_HERE if trust == "local" else in_sums(OWNERS_HERE, trust)


def task_words(engine: str, kind: str = "auction", unit: str = "update", trust: str = "local") -> TrustWords:
    """Of a broker's task, by its engine, its kind of market, what its losses are for and its trust model."""
    if trust != "local":
        there = AT_BROKER if kind == "sampling" else _AT_BROKER.get(kind, AT_BROKER)
        return SUMS_AT_OWNERS if engine == "flower" else in_sums(there, trust)
    words = _AT_OWNERS.get(kind, AT_OWNERS) if engine == "flower" else _AT_BROKER.get(kind, AT_BROKER)
    return replace(words, unit=_RECORD, protects="record") if kind == "auction" and unit == "record" else words


def market_words(*, on_owners_machines: bool) -> str:
    """Of a broker, by whether it offers tasks on owners' own machines."""
    if on_owners_machines:
        return (
            "Tasks are marked: on owners’ own machines, records and noise stay with their owners; a simulated task’s "
            "records lie with the broker, who adds the noise."
        )
    return (
        "This market simulates: the broker holds all records, trains for every owner and adds the noise. Nothing here "
        "keeps data from the broker."
    )


def certainty(epsilon_total: float) -> float:
    """How sure of a 50 : 50 suspicion releases of this total ε can make somebody at most: e^ε / (1 + e^ε)."""
    return 1 / (1 + math.exp(-min(epsilon_total, 700.0)))


def sure(epsilon_total: float) -> str:
    """The same as text that never says certain."""
    share = certainty(epsilon_total)
    return f"{100 * share:.{0 if share < 0.99 else 2}f} %" if share < 0.9999 else "more than 99.99 %"


def meaning_of(epsilon_total: float, record_delta: float = 0.0) -> str:
    """What a total ε, or a cap on it, means at worst: of all an owner's data, or with a δ of any one record."""
    of, but = "your data", ""
    if record_delta:
        of, but = "any one of your records", f", but for a chance of δ = {record_delta:g}"
    return (
        f"ε = {epsilon_total:.4g} in total means: somebody who gives anything about {of} a 50 : 50 chance, and sees "
        f"all that you release, can become {sure(epsilon_total)} sure of it at worst{but}, whatever else she knows "
        f"(e^ε / (1 + e^ε))."
    )
