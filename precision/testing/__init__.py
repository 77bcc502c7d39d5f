"""Helpers to test training under a policy: faults at given steps and ranks, processes to run ranks in, and the conformance
kit that a backend runs against itself. Imports no framework.
"""

from precision.testing.faults import Fault, FaultPlan
from precision.testing.ranks import RankError, free_port, run_ranks

__all__ = ["Fault", "FaultPlan", "RankError", "free_port", "run_ranks"]
