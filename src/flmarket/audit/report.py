"""What an audit found, as one frozen value that becomes JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from flmarket.audit.claims import ClaimVerdict
from flmarket.audit.efficiency import Efficiency
from flmarket.audit.example import Example
from flmarket.audit.rules import BudgetUse, Rationality
from flmarket.audit.structure import Structure
from flmarket.audit.truthfulness import Truthfulness

__all__ = ["AuditReport", "jsonable"]


@dataclass(frozen=True)
class AuditReport:
    """Everything measured about one mechanism on one population."""

    mechanism: str
    source: str
    assumes: str
    population: str
    profiles: int
    owners: int
    seed: int
    budget_factor: tuple[float, float]
    private: tuple[str, ...]
    randomised: bool
    truthful: Truthfulness
    rational: Rationality
    budget: BudgetUse
    structure: Structure
    efficiency: tuple[Efficiency, ...]
    claims: tuple[ClaimVerdict, ...] = ()

    @property
    def worst(self) -> Example:
        """The most profitable lie found, replayable; with gain 0 if there was none."""
        return self.truthful.worst

    @property
    def contradicted(self) -> tuple[ClaimVerdict, ...]:
        """The claims that did not survive."""
        return tuple(claim for claim in self.claims if claim.verdict == "contradicted")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON; what is infinite or not a number becomes null."""
        truthful = self.truthful
        values = {
            "mechanism": self.mechanism,
            "source": self.source,
            "assumes": self.assumes,
            "population": self.population,
            "profiles": self.profiles,
            "owners": self.owners,
            "seed": self.seed,
            "budget_factor": list(self.budget_factor),
            "private": list(self.private),
            "randomised": self.randomised,
            "truthful": asdict(truthful.overall)
            | {
                "judged": list(truthful.judged),
                "by_dimension": {name: asdict(regret) for name, regret in truthful.by_dimension.items()},
            },
            "rational": asdict(self.rational),
            "budget": asdict(self.budget),
            "structure": asdict(self.structure),
            "efficiency": [asdict(row) for row in self.efficiency],
            "search": asdict(truthful.search),
            "claims": [asdict(claim) for claim in self.claims],
            "worst": truthful.worst.to_dict(),
        }
        plain: dict[str, Any] = jsonable(values)
        return plain


def jsonable(value: Any) -> Any:
    """Tuples as lists, and no number that JSON does not have."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
