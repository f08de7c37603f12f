"""`commsched doctor`: whether a machine can build and run commsched, and what to do where it cannot."""

from commsched.doctor.checks import CHECKS, examine
from commsched.doctor.finding import NOTE, OK, PROBLEM, Finding
from commsched.doctor.machine import Machine

__all__ = ["CHECKS", "NOTE", "OK", "PROBLEM", "Finding", "Machine", "examine"]
