"""Audit: is a mechanism truthful, rational, within budget and private? On ours or on anybody's, from outside.

`audit(mechanism, population)` measures and judges; `replay(report.worst)` shows the worst lie again from its numbers
alone; `first_best` is the yardstick of efficiency; `audit_privacy` does for a perturbation what `audit` does for an
auction. A search that finds nothing is evidence, not proof: every report says what was searched.
"""

from __future__ import annotations

from flmarket.audit.auditor import AuditReport, ClaimVerdict, audit, check_claims, private_fields
from flmarket.audit.example import Bid, Curve, Example, replay
from flmarket.audit.first_best import Efficiency, first_best
from flmarket.audit.privacy import PrivacyAudit, audit_privacy
from flmarket.audit.rules import BudgetUse, Rationality, Structure
from flmarket.audit.sampled import SamplingAudit, audit_sampling
from flmarket.audit.search import STRENGTHS, Strength
from flmarket.audit.truthfulness import Regret, SearchLog, Truthfulness

__all__ = [
    "STRENGTHS",
    "AuditReport",
    "Bid",
    "BudgetUse",
    "ClaimVerdict",
    "Curve",
    "Efficiency",
    "Example",
    "PrivacyAudit",
    "Rationality",
    "Regret",
    "SamplingAudit",
    "SearchLog",
    "Strength",
    "Structure",
    "Truthfulness",
    "audit",
    "audit_privacy",
    "audit_sampling",
    "check_claims",
    "first_best",
    "private_fields",
    "replay",
]
