"""Audit: is a mechanism truthful, rational, within budget and private? On ours or on anybody's, from outside.

`audit(mechanism, population)` measures and judges; `replay(report.worst)` shows the worst lie again from its numbers
alone; `attack` looks beyond one round, one name and one purchase; `first_best` and `second_best` are yardsticks of
efficiency, and `bayesian_bound` is what no truthful market passes; `audit_privacy` does for a perturbation what `audit`
does for an auction, and `audit_releases` for whatever was released on two neighbouring data sets. A search that finds
nothing is evidence, not proof: every report says what was searched.
"""

from flmarket.audit.attacks import ATTACKS, Attack, attack
from flmarket.audit.auditor import (
    AuditReport,
    BudgetUse,
    ClaimVerdict,
    Rationality,
    Structure,
    audit,
    check_claims,
    private_fields,
)
from flmarket.audit.privacy import PrivacyAudit, ReleasesAudit, audit_privacy, audit_releases
from flmarket.audit.sampled import SamplingAudit, audit_sampling
from flmarket.audit.search import STRENGTHS, Strength
from flmarket.audit.truthfulness import (
    Bid,
    Certificate,
    Curve,
    Example,
    Regret,
    SearchLog,
    Truthfulness,
    certify,
    replay,
)
from flmarket.audit.yardsticks import (
    Efficiency,
    bayesian_bound,
    first_best,
    optimal_bound,
    over_second_best,
    rate_law,
    second_best,
)

__all__ = [
    "ATTACKS",
    "STRENGTHS",
    "Attack",
    "AuditReport",
    "Bid",
    "BudgetUse",
    "Certificate",
    "ClaimVerdict",
    "Curve",
    "Efficiency",
    "Example",
    "PrivacyAudit",
    "Rationality",
    "Regret",
    "ReleasesAudit",
    "SamplingAudit",
    "SearchLog",
    "Strength",
    "Structure",
    "Truthfulness",
    "attack",
    "audit",
    "audit_privacy",
    "audit_releases",
    "audit_sampling",
    "bayesian_bound",
    "certify",
    "check_claims",
    "first_best",
    "optimal_bound",
    "over_second_best",
    "private_fields",
    "rate_law",
    "replay",
    "second_best",
]
