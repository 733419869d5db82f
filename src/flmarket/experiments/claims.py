"""The papers' experimental claims, each with the items that test it: a table that the index page begins with.

A claim's evidence is a list of patterns over the keys of items ("flm22-fig7-*"), with "#name" for one of an item's
checks. Its verdict is theirs together: a difference counts, then doubt (`verdicts.combined`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from flmarket.experiments.items import Item
from flmarket.experiments.verdicts import Verdict, combined


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
    Claim("flm21", "Fig. 5", "At the smallest budgets All-in buys nobody.", ("flm21-fig5-*#nobody",)),
    Claim("flm21", "Fig. 5", "At small budgets MURBA outperforms All-in.", ("flm21-fig5-*#small-budgets",)),
    Claim("flm21", "Fig. 5", "VarOpt beats BiasOpt (noise of the whole gradient).", ("flm21-fig5-*#var-opt",)),
    Claim("flm21", "Fig. 5", "VarOpt beats BiasOpt (ERR as printed).", ("flm21-fig5-*#var-opt-printed",)),
    Claim(
        "flm21", "Fig. 5", "Highly sensitive: All-in is better at large budgets.", ("flm21-fig5-high#large-budgets",)
    ),
    Claim("flm21", "Fig. 6", "More owners lower every bound (noise of the whole gradient).", ("flm21-fig6-*#owners",)),
    Claim("flm21", "Fig. 6", "More owners lower every bound (ERR as printed).", ("flm21-fig6-*#owners-printed",)),
    Claim("flm21", "Fig. 6", "With few owners All-in may buy nobody.", ("flm21-fig6-*#nobody",)),
    Claim("flm21", "Fig. 6", "The lead of MURBA with VarOpt shrinks as owners become many.", ("flm21-fig6-*#lead",)),
    Claim("flm21", "Fig. 7", "MURBA's error bound falls as M grows.", ("flm21-fig7-*",)),
    Claim("flm21", "Fig. 8", "Accuracy on Bank Marketing tends to grow with the budget.", ("flm21-fig8-*#budget",)),
    Claim("flm21", "Fig. 8", "MURBA with VarOpt trains the most accurate models.", ("flm21-fig8-*#murba",)),
    Claim("flm21", "Table 1", "MURBA's regret and IR violations are small: .0009 to .16.", ("flm21-table1*",)),
    Claim("flm22", "Fig. 7", "DM-RegretNet's bound is below RegretNet's and M-RegretNet's.", ("flm22-fig7-*#dm",)),
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
        "DM-RegretNet's regret and IR violation are below RegretNet's and M-RegretNet's.",
        ("flm22-table1-*#order",),
    ),
    Claim("flm22", "Table I", "DM-RegretNet's are as printed (.02 to .06).", ("flm22-table1-*#metric",)),
    Claim("samp", "Fig. 1", "The optimal q falls in the cost.", ("samp-q#falls",)),
    Claim(
        "samp", "Figs. 2, 3", "Loss is complete information ≤ prior-based ≤ uniform sampling.", ("samp-loss-*#order",)
    ),
    Claim("samp", "Fig. 2", "On MNIST prior-based ends at 94 % of uniform's loss.", ("samp-loss-mnist-uniform#ratio",)),
    Claim(
        "samp",
        "Fig. 2",
        "On EMNIST (Fashion-MNIST without its files) at 90 %.",
        ("samp-loss-emnist-uniform#ratio", "samp-loss-fashion-mnist-uniform#ratio"),
    ),
    Claim("samp", "Fig. 4", "Average q falls with the mean cost.", ("samp-average-q#falls",)),
    Claim("samp", "Fig. 4", "It is above uniform sampling's (the text says lower).", ("samp-average-q#more",)),
    Claim("samp", "Alg. 1", "Without a prior the objective nears the optimum as clients become many.", ("samp-prior",)),
    Claim("stack", "Fig. 2(a)", "The number of participants grows with the users.", ("stack-fig2a",)),
    Claim("stack", "Fig. 2(b)", "It falls with the largest privacy value.", ("stack-fig2b",)),
    Claim("stack", "Fig. 3(a)", "The server's utility grows with the users, ever more slowly.", ("stack-fig3a",)),
    Claim("stack", "Fig. 3(b)", "It falls with the largest privacy value.", ("stack-fig3b",)),
    Claim("stack", "eq. (17)", "The printed utility has the trends of Fig. 3.", ("stack-eq17",)),
    Claim("stack", "Fig. 4(a)", "Users' mean utility falls with the users.", ("stack-fig4a#trend",)),
    Claim("stack", "Fig. 4(a)", "So does its spread among them.", ("stack-fig4a#spread",)),
    Claim("stack", "Fig. 4(b)", "It grows with the largest privacy value.", ("stack-fig4b#trend",)),
    Claim("stack", "Fig. 4(b)", "So does its spread.", ("stack-fig4b#spread",)),
    Claim("stack", "Alg. 2", "At the equilibrium no user gains by a deviation.", ("stack-equilibrium",)),
    Claim("jdp", "Fig. 2", "Clients and data selected grow with budget and candidates.", ("jdp-fig2-*#growth",)),
    Claim("jdp", "Fig. 2", "M2 selects no fewer of either than M1.", ("jdp-fig2-*#order",)),
    Claim("jdp", "Fig. 2(d)", "At 90 candidates M1 buys 35,000 records, M2 39,000.", ("jdp-fig2-*#levels",)),
    Claim("jdp", "Thm. 3", "M1 is budget-balanced.", ("jdp-promises#m1-budget",)),
    Claim("jdp", "§4.2", "M2 is budget-balanced.", ("jdp-promises#m2-budget",)),
    Claim("jdp", "§4.2.1", "M1 is envy-free.", ("jdp-promises#envy",)),
    Claim("jdp", "Alg. 4", "The choice of a group is ε-differentially private.", ("jdp-choice#paper",)),
    Claim("jdp", "Fig. 3", "Accuracy: no attack ≥ the method under attack > plain averaging.", ("jdp-fig3*#order",)),
    Claim("jdp", "Fig. 3", "The attack costs averaging 4 to 5 points, the method 1 to 2.", ("jdp-fig3*#gap",)),
    Claim("jdp", "Fig. 3", "So it does with the adversary's step doubled.", ("jdp-fig3*#boosted",)),
    Claim(
        "jdp",
        "Fig. 4",
        "Accuracy grows with ε and, up to a point, with the number of clients.",
        ("jdp-fig4*", "jdp-fig3*#epsilon"),
    ),
    Claim("jdp", "Fig. 5", "Accuracy grows with the size of the groups.", ("jdp-fig5#size",)),
    Claim("jdp", "Fig. 5", "Leave-one-out is better than any partition.", ("jdp-fig5#leave-one-out",)),
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
