"""The cross-backend parity suite: the same decisions and the same numbers, in tiers T0 to T4, on one device and on several."""

from precision.parity.adapter import (
    Array,
    NetworkResult,
    NetworkSpec,
    OpResult,
    ParityAdapter,
    ReplicaResult,
    ReplicaSpec,
    TrainResult,
    TrainSpec,
)
from precision.parity.autocast_cases import AUTOCAST_CASES, AutocastCase
from precision.parity.cases import CASES, OpCase
from precision.parity.models import MODELS, initial_weights

__all__ = [
    "AUTOCAST_CASES",
    "CASES",
    "MODELS",
    "Array",
    "AutocastCase",
    "NetworkResult",
    "NetworkSpec",
    "OpCase",
    "OpResult",
    "ParityAdapter",
    "ReplicaResult",
    "ReplicaSpec",
    "TrainResult",
    "TrainSpec",
    "initial_weights",
]
