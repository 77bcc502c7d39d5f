"""Names of dtypes to torch's dtype objects and back, and the casts that never narrow float64 or touch integers."""

from __future__ import annotations

import torch

from precision.errors import PolicyError
from precision.formats import DTYPES, canonical_dtype

TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
"""Canonical name to torch dtype."""

NAME: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH.items()} | {torch.float64: "float64"}
"""Floating torch dtype to NumPy name."""

LOW = frozenset(dtype for name, dtype in TORCH.items() if name != "float32")
"""The floating dtypes narrower than float32."""


def torch_dtype(name: object) -> torch.dtype:
    """The torch dtype of a name (``"bf16"``, ``"float32"``) or of a torch dtype. Raises ``PolicyError`` otherwise."""
    if isinstance(name, torch.dtype):
        if name not in NAME or name is torch.float64:
            raise PolicyError(f"{name} is not a policy dtype. Use one of {', '.join(DTYPES)}.")
        return name
    return TORCH[canonical_dtype(name)]


def dtype_name(dtype: torch.dtype) -> str:
    """The NumPy name of any torch dtype (``torch.int64`` gives ``"int64"``)."""
    return NAME.get(dtype) or str(dtype).removeprefix("torch.")


def castable(tensor: torch.Tensor) -> bool:
    """Whether a policy may change this tensor's dtype: floating, and not float64."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a floating tensor (not float64) to a dtype; any other tensor is returned as it is."""
    if tensor.dtype is dtype or not castable(tensor):
        return tensor
    return tensor.to(dtype)
