"""One HTML page for an overview or an explanation: the answer in words, figures, tables, origin."""

from mechtv.report.explanation import explanation_html, write_explanation
from mechtv.report.page import report_html, write_report

__all__ = ["explanation_html", "report_html", "write_explanation", "write_report"]
