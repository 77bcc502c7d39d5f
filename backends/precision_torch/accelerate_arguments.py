"""The plain form of an ``Accelerator``'s arguments (``precision.interop.accelerate``) as the objects it takes. Needs ``accelerate``."""

from __future__ import annotations

from typing import Any

from precision.errors import BackendUnavailableError, InteropError
from precision.interop.accelerate import from_accelerate, is_arguments
from precision_torch.dtypes import TORCH

try:
    from accelerate.utils import AutocastKwargs, FullyShardedDataParallelPlugin, GradScalerKwargs
except ImportError as error:
    raise BackendUnavailableError(
        f"Accelerate's arguments need Accelerate ({error}). Install it: pip install 'precision-policy[torch,interop]'."
    ) from error


def accelerator_arguments(config: Any) -> dict[str, Any]:
    """Keyword arguments for ``Accelerator(...)`` from their plain form.

    Args:
        config: what ``to_accelerate(policy, form="arguments")`` gives as ``config``, with whatever else was laid under it.

    Raises:
        InteropError: it is not in that form.

    Example:
        >>> from precision.interop import convert
        >>> config = convert("mixed_float16", "accelerate", form="arguments").config
        >>> accelerator_arguments(config)["kwargs_handlers"][0].init_scale
        65536.0
    """
    from_accelerate(config)  # raises if it is not valid
    if not is_arguments(config):
        raise InteropError(
            "this is the file of accelerate config: start the script with accelerate launch --config_file."
        )
    arguments = dict(config)
    handlers = list(arguments.pop("kwargs_handlers", None) or ())
    for key, kind in (("grad_scaler_kwargs", GradScalerKwargs), ("autocast_kwargs", AutocastKwargs)):
        if (values := arguments.pop(key, None)) is not None:
            handlers.append(kind(**values))
    if handlers:
        arguments["kwargs_handlers"] = handlers
    plugin = arguments.pop("fsdp_plugin", None)
    if plugin is not None:
        said = plugin.get("mixed_precision_policy")
        dtypes = {name: TORCH[dtype] for name, dtype in said.items()} if isinstance(said, dict) else said
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(**{**plugin, "mixed_precision_policy": dtypes})
    return arguments
