"""`commsched doctor`: whether a machine can build and run commsched, and what to do where it cannot."""

from commsched.doctor.checks import CHECKS, NOTE, OK, PROBLEM, Finding, examine
from commsched.doctor.machine import Machine

__all__ = ["CHECKS", "NOTE", "OK", "PROBLEM", "Finding", "Machine", "examine"]
