"""``TorchBackend``: what the registry finds under the name ``torch``."""

from __future__ import annotations

from typing import Any

import torch

from precision.backend import Backend, Capability, require_supported
from precision.errors import PolicyError
from precision.ops import OpEntry
from precision.policy import PrecisionPolicy
from precision_torch.agreement import Group
from precision_torch.bound import TorchPolicy
from precision_torch.capabilities import capabilities_of, resolve_device, visible_devices


class TorchBackend(Backend):
    """PyTorch.

    Example:
        >>> sorted({c.dtype for c in TorchBackend().capabilities()})
        ['bfloat16', 'float16', 'float32', 'float8_e4m3fn', 'float8_e5m2']
    """

    name = "torch"
    framework = "torch"

    def bind(
        self,
        policy: PrecisionPolicy,
        *,
        device: torch.device | str | None = None,
        process_group: Group = None,
        native_autocast: bool = False,
    ) -> TorchPolicy:
        """Tie a policy to a device, and to the ranks that train together.

        Args:
            policy: the policy.
            device: a torch device; by default CUDA, MPS or XPU if there is one, else the CPU.
            process_group: the ranks that agree on whether a step overflowed: a process group or a device mesh; None for
                those found from the model and its parameters, at each step (all ranks, where nothing else tells);
                ``"none"`` for every process by itself.
            native_autocast: leave the decisions of ``mp.autocast`` to ``torch.autocast`` and its lists, which depend on the
                device. Here, and not an argument of ``mp.autocast``, since trainers and plugins enter that for you.

        Raises:
            UnsupportedError: the device is not there, or cannot do what the policy asks.
            PolicyError: ``process_group`` is none, or ``native_autocast`` neither True nor False.
        """
        if not isinstance(native_autocast, bool):
            raise PolicyError(f"native_autocast must be True or False, not {native_autocast!r}.")
        where = resolve_device(device)
        require_supported(policy, capabilities_of(where), str(where))
        return TorchPolicy(policy, self, where, process_group, native_autocast)

    def versions(self) -> dict[str, str]:
        """The version of torch."""
        return {"torch": str(torch.__version__)}

    def capabilities(self) -> list[Capability]:
        """What each visible device can do with each dtype."""
        return [capability for device in visible_devices() for capability in capabilities_of(device)]

    def op_table(self) -> list[OpEntry]:
        """Torch's public functions by name, each once, in the first namespace that has it."""
        from precision_torch.op_families import op_table

        return op_table()

    def parity(self) -> Any:
        """The adapter for the parity suite."""
        from precision_torch.parity import TorchParity

        return TorchParity(self)
