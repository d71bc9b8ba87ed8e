"""The one-file HTML page of a run or a study."""

from loopscale.report.page import write_report
from loopscale.report.study_page import write_study_report

__all__ = ["write_report", "write_study_report"]
