"""The JAX backend: casts over any pytree, loss scaling inside an optax optimizer, function transforms.

Needs jax and optax only; Flax, Equinox and Haiku models are pytrees to it. Importing it touches no device.
"""

from precision_jax.autocast import CastRegion
from precision_jax.backend import JaxBackend
from precision_jax.bound import JaxPolicy
from precision_jax.clipping import clip_by_global_norm, global_norm
from precision_jax.optimizer import OptimizerState
from precision_jax.rounding import round_to
from precision_jax.scaler import JaxLossScaler, all_finite, select

__all__ = [
    "CastRegion",
    "JaxBackend",
    "JaxLossScaler",
    "JaxPolicy",
    "OptimizerState",
    "all_finite",
    "clip_by_global_norm",
    "global_norm",
    "round_to",
    "select",
]
