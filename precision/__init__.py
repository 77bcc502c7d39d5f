"""One precision policy for PyTorch, TensorFlow/Keras and JAX: the same decisions and the same numbers.

>>> import precision
>>> mp = precision.bind("mixed_bfloat16", backend="torch")    # doctest: +SKIP
"""

from precision._version import __version__
from precision.backend import Backend, BoundPolicy, Capability
from precision.checkpoint import CheckpointStore
from precision.errors import (
    BackendNotFoundError,
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    InteropError,
    LossScaleError,
    MasterWeightsError,
    MixedFrameworksError,
    NonFiniteGradientsError,
    PolicyError,
    PrecisionError,
    PrecisionWarning,
    StateError,
    UnsupportedError,
)
from precision.formats import DTYPES, FloatFormat
from precision.loss_scale import LossScale, LossScaler, LossScaleState, next_state
from precision.ops import FAMILIES, OpFamily, decide
from precision.policy import PrecisionPolicy, Rule
from precision.registry import (
    BackendInfo,
    bind,
    get_backend,
    list_backends,
    register_backend,
    unregister_backend,
)

__all__ = [
    "DTYPES",
    "FAMILIES",
    "Backend",
    "BackendInfo",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "BoundPolicy",
    "Capability",
    "CheckpointError",
    "CheckpointStore",
    "ConfigError",
    "FloatFormat",
    "InteropError",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "LossScaler",
    "MasterWeightsError",
    "MixedFrameworksError",
    "NonFiniteGradientsError",
    "OpFamily",
    "PolicyError",
    "PrecisionError",
    "PrecisionPolicy",
    "PrecisionWarning",
    "Rule",
    "StateError",
    "UnsupportedError",
    "__version__",
    "bind",
    "decide",
    "get_backend",
    "list_backends",
    "next_state",
    "register_backend",
    "unregister_backend",
]
