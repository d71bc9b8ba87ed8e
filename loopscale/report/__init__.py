"""The one-file HTML page of a run."""

from loopscale.report.page import write_report

__all__ = ["write_report"]
