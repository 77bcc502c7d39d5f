"""The TensorFlow/Keras backend of ``precision``. Users get at it through ``precision.bind(policy, backend="tensorflow")``.

Importing it registers the optimizer with Keras, so that saved models load without ``custom_objects``.
"""

from precision_tensorflow.backend import TensorFlowBackend
from precision_tensorflow.bound import TensorFlowPolicy
from precision_tensorflow.callback import LossScaleCallback
from precision_tensorflow.checkpoints import Checkpoints, Restored
from precision_tensorflow.guard import StateGuard
from precision_tensorflow.optimizer import PrecisionLossScaleOptimizer
from precision_tensorflow.resume import ResumeCallback
from precision_tensorflow.scaler import TensorFlowLossScaler
from precision_tensorflow.scope import Island, PolicyScope

__all__ = [
    "Checkpoints",
    "Island",
    "LossScaleCallback",
    "PolicyScope",
    "PrecisionLossScaleOptimizer",
    "Restored",
    "ResumeCallback",
    "StateGuard",
    "TensorFlowBackend",
    "TensorFlowLossScaler",
    "TensorFlowPolicy",
]
