"""`python -m rankwise doctor` and `strategies`: what is here, does it work, what is there to choose from?"""

from rankwise.doctor.command import main
from rankwise.doctor.report import Finding, Report, Section

__all__ = ["Finding", "Report", "Section", "main"]
