"""PyTorch backend of ``precision``: a bound policy hands out ``torch.autocast``, ``torch.amp.GradScaler`` and optimizers.

>>> import precision
>>> mp = precision.bind("mixed_bfloat16", backend="torch", device="cpu")
>>> with mp.autocast():
...     pass
"""

from precision_torch.backend import TorchBackend
from precision_torch.bound import TorchPolicy
from precision_torch.checkpoints import Checkpoints, Restored
from precision_torch.grad_scaler import PrecisionGradScaler
from precision_torch.loss_scaler import TorchLossScaler
from precision_torch.optimizer import ScaledOptimizer
from precision_torch.regions import Island
from precision_torch.step_result import StepResult

__all__ = [
    "Checkpoints",
    "Island",
    "PrecisionGradScaler",
    "Restored",
    "ScaledOptimizer",
    "StepResult",
    "TorchBackend",
    "TorchLossScaler",
    "TorchPolicy",
]
