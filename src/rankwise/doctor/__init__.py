"""`python -m rankwise doctor` diagnoses a job; `python -m rankwise strategies` lists the strategies."""

from rankwise.doctor.command import main
from rankwise.doctor.report import Finding, Report, Section

__all__ = ["Finding", "Report", "Section", "main"]
