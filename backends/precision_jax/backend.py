"""``JaxBackend``: what the registry loads."""

from __future__ import annotations

from typing import Any

import jax
import jaxlib
import optax

from precision.backend import Backend, Capability, require_supported
from precision.ops import OpEntry
from precision.policy import PrecisionPolicy
from precision_jax import devices
from precision_jax.bound import JaxPolicy


class JaxBackend(Backend):
    """The JAX backend. Making one touches no device; binding a policy does."""

    name = "jax"
    framework = "jax"

    def bind(self, policy: PrecisionPolicy, *, device: Any = None) -> JaxPolicy:  # type: ignore[override]
        """Tie a policy to JAX.

        Args:
            policy: the policy.
            device: the device to check the policy against: None for the default one, a name (``"cpu"``, ``"gpu:0"``) or a
                ``jax.Device``. It moves no data.

        Raises:
            UnsupportedError: the device cannot do what the policy asks, or there is no such device.
        """
        found = devices.find_device(device)
        require_supported(policy, devices.capabilities(found), devices.device_name(found))
        return JaxPolicy(policy, self, devices.device_name(found))

    def versions(self) -> dict[str, str]:
        """Versions of jax, jaxlib and optax."""
        return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "optax": optax.__version__}

    def capabilities(self) -> list[Capability]:
        """What each local device can do with each dtype."""
        return [capability for device in jax.local_devices() for capability in devices.capabilities(device)]

    def op_table(self) -> list[OpEntry]:
        """Every primitive and every function recognised as a whole, with its family."""
        from precision_jax.opcast.coverage import op_table

        return op_table()

    def parity(self) -> Any:
        """The adapter for the parity suite."""
        from precision_jax.parity import JaxParity

        return JaxParity()
