"""What a backend hands to the parity suite: its ops, its rounding, its scale trajectories and a training run.

The suite (:mod:`precision.parity.tiers`) judges; adapters only report what their framework did, as NumPy values.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from precision.loss_scale import LossScale
from precision.policy import PrecisionPolicy

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class OpResult:
    """What happened when a framework ran one op under a policy.

    Attributes:
        input_dtypes: NumPy dtype names of the inputs as the op itself saw them, after the casts.
        output_dtype: NumPy dtype name of the op's result.
        values: the result as float64 (float32, float16 and bfloat16 convert exactly).
    """

    input_dtypes: tuple[str, ...]
    output_dtype: str
    values: Array


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """A training run, fixed to the last number, that every backend performs alike.

    The optimizer is SGD with momentum, ``v = momentum * v + g; w = w - learning_rate * v``, without clipping. At step
    ``i`` the (float32) loss is multiplied by ``poison[i]`` before the loss scale is: 1, or infinity to force an overflow.

    Attributes:
        model: ``"mlp"``, ``"cnn"``, ``"transformer"`` or ``"chars"``; see :mod:`precision.parity.models` for the exact maths.
        policy: the policy to train under.
        weights: initial float32 parameters and BatchNorm statistics by canonical name and layout.
        inputs: float32 ``(steps, batch, ...)``; int32 ``(steps, batch, context)`` for ``chars``.
        labels: int32 ``(steps, batch)``; ``(steps, batch, context)`` for ``chars``.
        poison: float32 ``(steps,)``.
        eval_inputs, eval_labels: held-out data for the accuracy, in evaluation mode.
        learning_rate, momentum: of the optimizer.
    """

    model: str
    policy: PrecisionPolicy
    weights: dict[str, Array]
    inputs: Array
    labels: Array
    poison: Array
    eval_inputs: Array
    eval_labels: Array
    learning_rate: float
    momentum: float = 0.9

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return len(self.poison)


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a training run did.

    Attributes:
        losses: the loss at each step, before poison and loss scale.
        scales: the loss scale each step was scaled with.
        skipped: whether each step was skipped.
        accuracy: share of the held-out labels predicted right, 0 to 1.
        state: the neutral loss-scale state at the end.
        step_seconds: wall time of each step in seconds (the first ones include compilation).
        weights: parameters and BatchNorm statistics at the end, float32, canonical names and layouts.
    """

    losses: list[float]
    scales: list[float]
    skipped: list[bool]
    accuracy: float
    state: dict[str, float | int]
    step_seconds: list[float]
    weights: dict[str, Array]


class ParityAdapter(abc.ABC):
    """One backend's side of the parity suite.

    Attributes:
        name: the backend's name.
        flushes_subnormals: dtypes whose subnormals the framework's cast flushes to zero on this machine (stated, not
            hidden: T2 then expects exactly that).
        saturates: dtypes whose overflow the framework's cast turns into the largest finite value, where ``ml_dtypes`` gives
            infinity or NaN (stated alike).
    """

    name: str
    flushes_subnormals: frozenset[str] = frozenset()
    saturates: frozenset[str] = frozenset()

    @abc.abstractmethod
    def run_op(self, mp: Any, case: str, family: str, inputs: Sequence[Array]) -> OpResult:
        """Run the framework's own op for a case (see :mod:`precision.parity.cases`) wrapped in ``mp.op(family)``.

        Args:
            mp: a policy bound to this backend.
            case: the case's name; the op's exact maths and layouts are in its docstring.
            family: the op family to mark it with.
            inputs: NumPy arrays (dtypes of ``ml_dtypes`` included), passed to the op in order, as tensors of that dtype.
        """

    @abc.abstractmethod
    def round_to(self, values: Array, dtype: str) -> Array:
        """Cast float32 values to a low dtype and back with the framework's own casts (compiled, where it compiles)."""

    @abc.abstractmethod
    def trajectory(
        self,
        config: LossScale,
        finite: Sequence[bool],
        form: Literal["neutral", "native"],
        start: Mapping[str, float | int] | None = None,
    ) -> list[dict[str, float | int]]:
        """Run the loss-scale rule over a pattern of finite and overflowing steps.

        Args:
            config: mode ``"dynamic"`` or ``"static"``.
            finite: whether each step's gradients are finite.
            form: ``"neutral"`` drives ``mp.loss_scaler`` with its explicit state; ``"native"`` drives the framework's
                own object (``GradScaler``, ``LossScaleOptimizer``, optax transformation) through real steps whose
                gradients are finite or not.
            start: a saved state to resume from; None starts afresh.

        Returns:
            The neutral state dict after each step.
        """

    @abc.abstractmethod
    def train(self, spec: TrainSpec) -> TrainResult:
        """Perform a training run with the backend's public API (autocast, scaler or optimizer of the bound policy)."""
