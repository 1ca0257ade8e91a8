"""One HTML page for an overview, an explanation or a study: words, figures, tables, origin."""

from mechtv.report.explanation import explanation_html, write_explanation
from mechtv.report.page import report_html, write_report
from mechtv.report.study import study_html, write_study

__all__ = [
    "explanation_html",
    "report_html",
    "study_html",
    "write_explanation",
    "write_report",
    "write_study",
]
