"""Does a task of the user's resume exactly? It is trained, killed, resumed, and compared step by step."""

from .check import Report, verify_resume
from .compare import Difference

__all__ = ["Difference", "Report", "verify_resume"]
