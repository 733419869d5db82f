"""Reports: what a run did, as one HTML page, strict JSON, CSV and figures, for buyers, owners and papers.

Importing this package is cheap: matplotlib and jinja2 (the `app` extra) are loaded when something is drawn or written.
"""

from flmarket.report.audit_page import write_audit
from flmarket.report.charts import Chart, market_charts
from flmarket.report.comparison import Comparison, ComparisonRow, write_comparison, write_reproduction
from flmarket.report.curves import Curve, CurveSet, write_curves
from flmarket.report.html import Check, check_guarantees, said, summarize, write_report
from flmarket.report.sampled_page import summarize_sampled, write_sampled

__all__ = [
    "Chart",
    "Check",
    "Comparison",
    "ComparisonRow",
    "Curve",
    "CurveSet",
    "check_guarantees",
    "market_charts",
    "said",
    "summarize",
    "summarize_sampled",
    "write_audit",
    "write_comparison",
    "write_curves",
    "write_report",
    "write_reproduction",
    "write_sampled",
]
