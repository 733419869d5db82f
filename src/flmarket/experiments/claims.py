"""The papers' experimental claims, each with the items that test it: a table that the index page begins with.

A claim's evidence is a list of patterns over the keys of items ("flm22-fig7-*"), with "#name" for one of an item's
checks. Its verdict is theirs together: a single difference counts, and a claim of which nothing was run is "not run".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from flmarket.experiments.items import Item, Verdict, combined

__all__ = ["CLAIMS", "PAPERS", "Claim", "JudgedClaim", "Paper", "judge"]


@dataclass(frozen=True)
class Paper:
    """Where the claims are from."""

    title: str
    source: str


PAPERS = {
    "flm21": Paper("FL-Market, 2021", "Zheng, Cao and Yoshikawa, first version"),
    "flm22": Paper("FL-Market, 2022", "Zheng, Cao and Yoshikawa, IEEE Big Data 2022"),
    "samp": Paper("Client sampling with private costs", "Liao, Luo, Feng and Zhang"),
    "stack": Paper("Trading data for learning", "Hu and Gong"),
    "jdp": Paper(
        "Robust federated learning with joint differential privacy", "Zhang, Zhu, Xiong, Zhou and Yu, IEEE TKDE"
    ),
    "beyond": Paper("Beyond the papers", "the same measures on questions that the papers leave open"),
}


@dataclass(frozen=True)
class Claim:
    """One statement of a paper's experiments."""

    paper: str
    where: str
    text: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class JudgedClaim:
    """A claim, what became of it, and the items that say so."""

    claim: Claim
    verdict: Verdict
    reasons: tuple[str, ...]
    items: tuple[str, ...]


CLAIMS = (
    Claim(
        "flm21", "Fig. 5", "At small budgets MURBA beats All-in, which buys nobody.", ("flm21-fig5-*#small-budgets",)
    ),
    Claim("flm21", "Fig. 5", "VarOpt beats BiasOpt.", ("flm21-fig5-*#var-opt",)),
    Claim(
        "flm21",
        "Fig. 5",
        "In the highly sensitive scenario All-in is better at large budgets.",
        ("flm21-fig5-high#large-budgets",),
    ),
    Claim("flm21", "Fig. 6", "More owners lower every error bound at one budget.", ("flm21-fig6-*#owners",)),
    Claim("flm21", "Fig. 6", "With few owners All-in may buy nobody.", ("flm21-fig6-*#nobody",)),
    Claim("flm21", "Fig. 6", "The lead of MURBA with VarOpt shrinks as owners become many.", ("flm21-fig6-*#lead",)),
    Claim("flm21", "Fig. 7", "MURBA's error bound falls as M grows.", ("flm21-fig7-*",)),
    Claim("flm21", "Fig. 8", "Accuracy on Bank Marketing tends to grow with the budget.", ("flm21-fig8-*#budget",)),
    Claim("flm21", "Fig. 8", "MURBA with VarOpt trains the most accurate models.", ("flm21-fig8-*#murba",)),
    Claim("flm21", "Table 1", "MURBA's regret and IR violations are small: .0009 to .16.", ("flm21-table1*",)),
    Claim(
        "flm22", "Fig. 7", "DM-RegretNet has a lower error bound than RegretNet and M-RegretNet.", ("flm22-fig7-*#dm",)
    ),
    Claim("flm22", "Fig. 7", "OptAggr is below ConvlAggr under every auction.", ("flm22-fig7-*#opt-aggr",)),
    Claim("flm22", "Fig. 7", "The error bound still falls beyond B̄ = 1.", ("flm22-fig7-*#budget",)),
    Claim("flm22", "Fig. 8", "DM-RegretNet never yields an invalid gradient.", ("flm22-fig8-*#dm",)),
    Claim("flm22", "Fig. 8", "RegretNet and M-RegretNet often do.", ("flm22-fig8-*#randomised",)),
    Claim("flm22", "Fig. 9", "DM-RegretNet trains more accurate models.", ("flm22-fig9-*#dm",)),
    Claim("flm22", "Fig. 9", "OptAggr trains more accurate models than ConvlAggr.", ("flm22-fig9-*#opt-aggr",)),
    Claim("flm22", "Fig. 10", "A larger M lowers M-RegretNet's regret and IR violation.", ("flm22-fig10*",)),
    Claim(
        "flm22",
        "Table I",
        "DM-RegretNet's regret and IR violation are far below RegretNet's and M-RegretNet's (regret .04 to .06).",
        ("flm22-table1-*#order",),
    ),
    Claim(
        "samp", "Figs. 2, 3", "Loss is complete information ≤ prior-based ≤ uniform sampling.", ("samp-loss-*#order",)
    ),
    Claim("samp", "Figs. 2, 3", "On MNIST prior-based ends at 94 % of uniform's loss.", ("samp-loss-mnist-*#ratio",)),
    Claim(
        "samp",
        "Figs. 2, 3",
        "On EMNIST (here Fashion-MNIST) at 90 %.",
        ("samp-loss-fashion-mnist-*#ratio",),
    ),
    Claim(
        "samp",
        "Fig. 4",
        "Average q falls with the mean cost; the mechanism recruits more than uniform sampling (the text says lower).",
        ("samp-average-q",),
    ),
    Claim("samp", "Fig. 1", "The optimal q falls in the cost.", ("samp-q",)),
    Claim(
        "samp",
        "Alg. 1",
        "Without a prior the objective approaches the optimum as clients become many.",
        ("samp-prior",),
    ),
    Claim("stack", "Fig. 2(a)", "The number of participants grows with the users.", ("stack-fig2a",)),
    Claim("stack", "Fig. 2(b)", "It falls with the largest privacy value.", ("stack-fig2b",)),
    Claim("stack", "Fig. 3(a)", "The server's utility grows with the users, ever more slowly.", ("stack-fig3a",)),
    Claim("stack", "Fig. 3(b)", "It falls with the largest privacy value.", ("stack-fig3b",)),
    Claim("stack", "Fig. 4(a)", "Users' mean utility falls with the users.", ("stack-fig4a",)),
    Claim("stack", "Fig. 4(b)", "It grows with the largest privacy value.", ("stack-fig4b",)),
    Claim("stack", "Theorem 1", "At the equilibrium no user gains by a deviation.", ("stack-equilibrium",)),
    Claim("jdp", "Fig. 2", "Clients and data selected grow with budget and candidates; M2 ≥ M1.", ("jdp-fig2*",)),
    Claim(
        "jdp",
        "Fig. 3",
        "Under attack plain averaging loses 4 to 5 points of accuracy, the method 1 to 2.",
        ("jdp-fig3*",),
    ),
    Claim("jdp", "Fig. 4", "Accuracy grows with ε and, up to a point, with the number of clients.", ("jdp-fig4*",)),
    Claim("jdp", "Fig. 5", "How clients are grouped moves the accuracy.", ("jdp-fig5*",)),
)


def judge(items: Iterable[Item], claims: Sequence[Claim] = CLAIMS) -> list[JudgedClaim]:
    """Every claim with its verdict, from whatever items there are."""
    items = list(items)
    return [_judged(claim, items) for claim in claims]


def _judged(claim: Claim, items: Sequence[Item]) -> JudgedClaim:
    verdicts: list[Verdict] = []
    reasons, used = [], []
    for pattern in claim.evidence:
        keys, _, name = pattern.partition("#")
        for item in items:
            if not fnmatchcase(item.key, keys):
                continue
            found = [(check.verdict, check.evidence) for check in item.checks if check.key == name]
            if not name:
                found = [(item.verdict, item.reason)]
            for verdict, reason in found:
                verdicts.append(verdict)
                reasons.append(f"{item.title}: {reason}")
                used.append(item.key)
    return JudgedClaim(claim, combined(verdicts), tuple(reasons), tuple(dict.fromkeys(used)))
