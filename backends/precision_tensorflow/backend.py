"""``TensorFlowBackend``: the entry the registry loads."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from precision.backend import Backend, BoundPolicy, Capability, require_supported
from precision.errors import BackendUnavailableError, UnsupportedError, nearest
from precision.ops import OpEntry
from precision.policy import PrecisionPolicy
from precision_tensorflow import devices


class TensorFlowBackend(Backend):
    """TensorFlow and Keras 3 (on its TensorFlow backend)."""

    name = "tensorflow"
    framework = "tensorflow"

    def bind(self, policy: PrecisionPolicy, device: str | None = None, **options: Any) -> BoundPolicy:
        """Tie a policy to TensorFlow.

        Args:
            policy: the policy.
            device: the device whose abilities count (``"CPU:0"``, ``"GPU:0"``); the first GPU, else the CPU.
            options: none other are known.

        Raises:
            BackendUnavailableError: Keras runs on another backend than TensorFlow.
            UnsupportedError: the device cannot do what the policy asks, or an option is unknown.
        """
        require_keras_on_tensorflow()
        if options:
            unknown = next(iter(options))
            raise UnsupportedError(f"unknown option {unknown!r}.{nearest(unknown, ['device'])} Known: device.")
        from precision_tensorflow.bound import TensorFlowPolicy

        found = devices.capabilities()
        chosen = device or devices.default_device()
        known = list(dict.fromkeys(capability.device for capability in found))
        if chosen not in known:
            raise UnsupportedError(f"unknown device {chosen!r}. TensorFlow sees {', '.join(known)}.")
        require_supported(policy, found, chosen)
        return TensorFlowPolicy(policy, self, chosen)

    def versions(self) -> dict[str, str]:
        return {"tensorflow": str(tf.__version__), "keras": str(keras.__version__)}

    def capabilities(self) -> list[Capability]:
        return devices.capabilities()

    def op_table(self) -> list[OpEntry]:
        from precision_tensorflow.opcast.coverage import op_table

        return op_table()

    def parity(self) -> Any:
        from precision_tensorflow.parity import TensorFlowParity

        return TensorFlowParity(self)


def require_keras_on_tensorflow() -> None:
    """Raise ``BackendUnavailableError`` if Keras was imported on another backend."""
    running = keras.backend.backend()
    if running != "tensorflow":
        raise BackendUnavailableError(
            f"Keras runs on {running!r} in this process, and the tensorflow backend needs it on TensorFlow. Set the "
            'environment variable KERAS_BACKEND=tensorflow (or "backend": "tensorflow" in keras.json) before keras is '
            "first imported."
        )
