"""What a backend hands to the parity suite: its ops, its rounding, its scale trajectories and a training run.

The suite (:mod:`precision.parity.tiers`) judges; adapters only report what their framework did, as NumPy values.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from precision.errors import UnsupportedError
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


@dataclasses.dataclass(frozen=True)
class NetworkSpec:
    """One forward and backward pass of a whole network under op-level autocast.

    Attributes:
        network: ``"resnet"``, ``"transformer"``, ``"lstm"`` or ``"unet"``; see :mod:`precision.parity.networks`.
        policy: the policy it runs under, without a loss scale.
        weights: float32 parameters and BatchNorm statistics by canonical name and layout.
        inputs: float32, or int32 tokens.
        labels: int32.
        compiled: whether to compile it (``jax.jit``, ``tf.function``, ``torch.compile``) or run it op by op.
    """

    network: str
    policy: PrecisionPolicy
    weights: dict[str, Array]
    inputs: Array
    labels: Array
    compiled: bool = True


@dataclasses.dataclass(frozen=True)
class NetworkResult:
    """What a pass did.

    Attributes:
        loss: the mean cross-entropy, float32.
        logits: as float64.
        gradients: of the loss with respect to each trained weight, canonical names and layouts, float32.
        gradient_dtypes: the dtype in which each gradient arrived.
        modules: NumPy dtype name of each module's result, by canonical module name, as it left the module.
        saved_bytes: bytes of all distinct arrays kept for the backward pass, parameters and inputs themselves excluded.
    """

    loss: float
    logits: Array
    gradients: dict[str, Array]
    gradient_dtypes: dict[str, str]
    modules: dict[str, str]
    saved_bytes: int


@dataclasses.dataclass(frozen=True)
class ReplicaSpec:
    """Steps of data-parallel training on several replicas, some of which overflow at some steps.

    The parameters are one float32 vector of four zeros. On replica ``r`` (from 0) the loss is
    ``12 * (r + 1) * sum(parameters)`` times ``factors[step, r]`` (the poison: 1, infinity or NaN), and then the loss scale;
    gradients are averaged over the replicas; the optimizer is plain SGD with a learning rate of ``2**-6``, without clipping.
    With 2, 3 or 4 replicas all of it is exact in float32 (12 divides by each).

    Attributes:
        config: mode ``"dynamic"`` or ``"static"``.
        factors: float32 ``(steps, replicas)``.
    """

    config: LossScale
    factors: Array

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return int(self.factors.shape[1])


@dataclasses.dataclass(frozen=True)
class ReplicaResult:
    """What each replica held after each step.

    Attributes:
        states: the loss-scale state's five fields, in order, as float64 ``(replicas, steps, 5)``.
        weights: the parameters, float32 ``(replicas, steps, 4)``.
    """

    states: Array
    weights: Array


class ParityAdapter(abc.ABC):
    """One backend's side of the parity suite.

    Attributes:
        name: the backend's name.
        engines: what it trains several replicas with (``"ddp"``, ``"mirrored"``, ``"shard_map"``), for :meth:`replicated`;
            empty if it does not.
        models: the models of :meth:`train` that it has; empty if it does not train.
        flushes_subnormals: dtypes whose subnormals the framework's cast flushes to zero on this machine (stated, not
            hidden: T2 then expects exactly that).
        saturates: dtypes whose overflow the framework's cast turns into the largest finite value, where ``ml_dtypes`` gives
            infinity or NaN (stated alike).
    """

    name: str
    engines: tuple[str, ...] = ()
    models: tuple[str, ...] = ("mlp", "cnn", "transformer", "chars")
    flushes_subnormals: frozenset[str] = frozenset()
    saturates: frozenset[str] = frozenset()

    def tensor(self, array: Array) -> Any:
        """The framework's tensor of a NumPy array's values and dtype (those of ``ml_dtypes`` included), on its device.

        The conformance kit needs it; the tiers do not.
        """
        raise UnsupportedError(f"the adapter of backend {self.name!r} has no tensor(): the conformance kit needs it.")

    def array(self, tensor: Any) -> Array:
        """The NumPy array of a tensor's (or a device scalar's) values and dtype; :meth:`tensor`'s inverse."""
        raise UnsupportedError(f"the adapter of backend {self.name!r} has no array(): the conformance kit needs it.")

    @abc.abstractmethod
    def run_op(self, mp: Any, case: str, family: str, inputs: Sequence[Array]) -> OpResult:
        """Run the framework's own op for a case (see :mod:`precision.parity.cases`) wrapped in ``mp.op(family)``.

        Args:
            mp: a policy bound to this backend.
            case: the case's name; the op's exact maths and layouts are in its docstring.
            family: the op family to mark it with.
            inputs: NumPy arrays (dtypes of ``ml_dtypes`` included), passed to the op in order, as tensors of that dtype.
        """

    def autocast_ops(self, mp: Any, calls: Sequence[tuple[str, Sequence[Array]]]) -> list[OpResult]:
        """Run ops as the framework's users spell them under ``mp.autocast`` (see :mod:`precision.parity.autocast_cases`).

        The results tell what was observed in what ran: ``input_dtypes`` are those in which each input is first consumed by
        an op that computes, seen through casts and moves (of an input that is only moved: the dtype it leaves in; of integers
        and bools: their own); two different ones are joined by ``+``, sorted. ``output_dtype`` is the op's own result's.

        Args:
            mp: a policy bound to this backend.
            calls: a case's name and its inputs each; independent of each other, so they may be compiled together.
        """
        raise UnsupportedError(f"the adapter of backend {self.name!r} has no op-level autocast.")

    def autocast_network(self, spec: NetworkSpec) -> NetworkResult:
        """One forward and backward pass of a network under ``mp.autocast`` (see :mod:`precision.parity.networks`)."""
        raise UnsupportedError(f"the adapter of backend {self.name!r} has no op-level autocast.")

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

    def replicated(self, engine: str, specs: Sequence[ReplicaSpec]) -> list[ReplicaResult]:
        """Train several replicas with one of :attr:`engines`, through the backend's public API, for each spec.

        May be called in a daemonic process: start others with :func:`precision.testing.run_ranks`.

        Args:
            engine: one of :attr:`engines`.
            specs: any number of them, with different settings and numbers of replicas; they are independent runs.

        Returns:
            A result for each spec, in order.
        """
        raise UnsupportedError(f"backend {self.name!r} trains on one device only; it has no engine {engine!r}.")
