"""One HTML page for an overview: the answer in words, figures, tables, and how it was made."""

from mechtv.report.page import report_html, write_report

__all__ = ["report_html", "write_report"]
