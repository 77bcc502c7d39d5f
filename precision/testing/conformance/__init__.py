"""The conformance kit: what every backend must do, as checks that a backend runs against itself.

In one call, ``precision.testing.conformance.run("mine").require()``; with pytest,
``PRECISION_BACKEND=mine pytest --pyargs precision.testing.conformance``.
"""

from precision.testing.conformance.kit import CHECKS, Check, CheckResult, Kit, Report, run, run_check

__all__ = ["CHECKS", "Check", "CheckResult", "Kit", "Report", "run", "run_check"]
