"""``TensorFlowPolicy``: a policy tied to TensorFlow, whose members give Keras's own objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import keras

from precision.backend import Backend, BoundPolicy, warn_idle_reduce
from precision.errors import PolicyError, nearest
from precision.formats import canonical_dtype
from precision.policy import PrecisionPolicy
from precision_tensorflow import casts, devices, replicas
from precision_tensorflow.callback import LossScaleCallback
from precision_tensorflow.checkpoints import Checkpoints
from precision_tensorflow.guard import StateGuard
from precision_tensorflow.keras_policy import keras_policy
from precision_tensorflow.opcast import Autocast, idle
from precision_tensorflow.optimizer import PrecisionLossScaleOptimizer
from precision_tensorflow.prepare import output_layer, prepare
from precision_tensorflow.replicas import require_no_keras_distribution
from precision_tensorflow.scaler import TensorFlowLossScaler
from precision_tensorflow.scope import Island, PolicyScope


class TensorFlowPolicy(BoundPolicy):
    """A policy tied to TensorFlow and Keras; made by ``precision.bind(policy, backend="tensorflow")``.

    Attributes:
        policy: the policy.
        backend: the backend.
        loss_scaler: the neutral loss scaler, with explicit state.
        device: the device the policy was checked against.

    Example:
        >>> mp = precision.bind("mixed_bfloat16", backend="tensorflow")     # doctest: +SKIP
        >>> with mp.scope():                                                # doctest: +SKIP
        ...     model = mp.prepare(build())
        >>> model.compile(optimizer=mp.optimizer("adam"), loss="mse")       # doctest: +SKIP
    """

    def __init__(self, policy: PrecisionPolicy, backend: Backend, device: str) -> None:
        self.policy = policy
        self.backend = backend
        self.device = device
        self.loss_scaler = TensorFlowLossScaler(policy.loss_scale)

    # ---- layers --------------------------------------------------------------------------------------------------

    def keras_policy(self) -> keras.DTypePolicy:
        """The policy as a ``keras.DTypePolicy``, or a ``DTypePolicyMap`` with the module rules; for a layer's ``dtype=``.

        Raises:
            UnsupportedError: Keras has no such pair of parameter and compute dtype.
        """
        self._warn_of_families("Keras's policies go by layer")
        return keras_policy(self.policy)

    def scope(self) -> PolicyScope:
        """The policy for layers created inside ``with mp.scope():``; see :class:`~precision_tensorflow.scope.PolicyScope`."""
        return PolicyScope(self.keras_policy())

    def island(self, dtype: str = "float32") -> Island:
        """Keep a dtype whatever is around: for layers created inside, and, as a decorator, for a function's inputs.

        Inside of what ``mp.autocast`` runs, decorator and context manager keep it for the ops made inside.

        Raises:
            UnsupportedError: the device does not compute in the dtype.
        """
        dtype = canonical_dtype(dtype)
        devices.require_computing(self.device, dtype, "an island")
        return Island(dtype)

    def output_layer(self, name: str | None = None) -> keras.layers.Layer:
        """A layer that passes its input on in the output dtype; the last one of a model."""
        return output_layer(self.policy, name)

    def prepare(self, model: keras.Model, *, guard: bool = True, autocast: bool = False) -> keras.Model:
        """Make a model leave in the output dtype and keep its statistics on skipped steps; see :func:`.prepare.prepare`.

        Args:
            model: a built Keras model.
            guard: whether skipped steps put non-trainable state back.
            autocast: whether ``fit``, ``evaluate`` and ``predict`` cast op by op (:meth:`autocast`) instead of leaving each
                layer to its dtype policy. The model is made of float32 layers then, outside of :meth:`scope`.
        """
        return prepare(self.policy, model, guard=guard, autocast=self.autocast if autocast else None)

    # ---- functions and trees -------------------------------------------------------------------------------------

    def autocast(self, function: Callable[..., Any], *, recompute: bool = True, jit_compile: bool | None = None) -> Any:
        """Run a function's ops each in the dtype that the policy gives it. A decorator.

        The function is traced once for each input signature, as a ``tf.function`` is, and its graph made again op by op with
        casts; calls run at a graph's speed. Loops, branches and functions are entered; variables keep their dtype, and their
        gradients arrive in it. See the guide on op-level autocast.

        Args:
            function: a Python function of tensors, a ``tf.function``, a Keras layer or model.
            recompute: whether softmax, norms and activations are computed again in the backward pass from their low inputs,
                rather than their float32 insides kept.
            jit_compile: as ``tf.function`` takes it; that of the function, if it is a ``tf.function``, unless given.

        Returns:
            A function of the same arguments; floating results leave in the output dtype. Under a policy with nothing to do
            (float32 throughout, no rules) the function itself.

        Raises:
            PolicyError: not a function.

        Example:
            >>> step = mp.autocast(tf.function(lambda x: tf.nn.softmax(x @ weights)))      # doctest: +SKIP
        """
        if not callable(function):
            raise PolicyError(f"mp.autocast takes a function of tensors, a Keras layer or model, not {function!r}.")
        if idle(self.policy):
            return function
        return self.autocast_as_is(
            function, output=self.policy.output_dtype, recompute=recompute, jit_compile=jit_compile
        )

    def autocast_as_is(self, function: Callable[..., Any], **options: Any) -> Autocast:
        """:meth:`autocast` whose results leave as they come, also under a policy with nothing to do."""
        native = devices.multiplies(self.device, self.policy.compute_dtype)
        return Autocast(self.policy, function, self.device.partition(":")[0], native, **options)

    def cast_boundary(self, function: Callable[..., Any]) -> Any:
        """A decorator: floating inputs come in the compute dtype, outputs leave in the output dtype.

        Casts happen at the function's boundary only. Variables that the function closes over keep their dtype (pass
        them in, or use layers, which follow their own policy).
        """
        self._warn_of_families("mp.cast_boundary casts at a function's boundary")
        return casts.autocast(self.policy, function)

    def op(self, family: str) -> Any:
        """A decorator that casts a function's floating inputs as its op family asks, with Keras's autocasting off inside.

        Raises:
            PolicyError: the family is unknown.
        """
        return casts.op(self.policy, family)

    def cast_to_param(self, tree: Any) -> Any:
        """Cast floating leaves (not float64) to the parameter dtype; a module rule for a leaf's path wins."""
        return casts.cast_tree(tree, self.policy.param_dtype, self.policy)

    def cast_to_compute(self, tree: Any) -> Any:
        """Cast floating leaves (not float64) to the compute dtype; a module rule for a leaf's path wins."""
        return casts.cast_tree(tree, self.policy.compute_dtype, self.policy)

    def cast_to_output(self, tree: Any) -> Any:
        """Cast floating leaves (not float64) to the output dtype."""
        return casts.cast_tree(tree, self.policy.output_dtype)

    # ---- training ------------------------------------------------------------------------------------------------

    def optimizer(self, optimizer: Any, **kwargs: Any) -> PrecisionLossScaleOptimizer:
        """Wrap a Keras optimizer so that it scales, unscales and skips as the policy says, whatever the policy's name.

        With loss-scale mode ``"none"`` the result passes everything through unchanged.

        Args:
            optimizer: a Keras optimizer, its name or config. A native ``LossScaleOptimizer`` is taken apart: its inner
                optimizer is wrapped and its scale taken over.
            kwargs: ``name``, ``clipnorm``, ``global_clipnorm``, ``clipvalue``, ``master_weights``, ``reduce_dtype`` (the
                policy's if left out); see
                :class:`~precision_tensorflow.optimizer.PrecisionLossScaleOptimizer`.

        Make it inside ``strategy.scope()`` under a ``tf.distribute`` strategy.

        Raises:
            UnsupportedError: a ``keras.distribution`` is set, which Keras ignores on TensorFlow.
            PolicyError: the policy cannot train, or the optimizer is wrapped already, or is none that Keras knows.
        """
        self.policy.require_trainable()
        require_no_keras_distribution()
        if replicas.count() == 1:
            warn_idle_reduce(self.policy, stacklevel=3)
        try:
            native = keras.optimizers.get(optimizer)
        except ValueError as error:
            known = sorted(name.lower() for name in dir(keras.optimizers) if name[0].isupper())
            meant = nearest(optimizer.lower(), known) if isinstance(optimizer, str) else ""
            raise PolicyError(
                f"mp.optimizer takes a Keras optimizer, its name or its config, not {optimizer!r}.{meant}"
            ) from error
        kwargs = {"reduce_dtype": self.policy.reduce_dtype, **kwargs}
        if isinstance(native, PrecisionLossScaleOptimizer):
            raise PolicyError("this optimizer is wrapped already; pass the native one (optimizer.inner_optimizer).")
        if not isinstance(native, keras.optimizers.LossScaleOptimizer):
            return PrecisionLossScaleOptimizer(native, self.policy.loss_scale, **kwargs)
        wrapped = PrecisionLossScaleOptimizer(native.inner_optimizer, self.policy.loss_scale, **kwargs)
        wrapped.load_state_dict(native)
        return wrapped

    def guard(self, state: keras.layers.Layer | Iterable[Any]) -> StateGuard:
        """Around a step of a custom loop: a model's BatchNorm statistics (or given variables) survive a skip unchanged."""
        return StateGuard(state)

    def checkpoints(
        self, directory: str | os.PathLike[str], keep: int | None = None, *, keras_file: bool = False
    ) -> Checkpoints:
        """Checkpoints of a run in a folder: whole after a kill at any moment, and for any number of replicas.

        Args:
            directory: a folder that all workers see; made when the first checkpoint is saved.
            keep: how many complete checkpoints to keep; None keeps all.
            keras_file: whether each also holds the model as a ``.keras`` file.

        Returns:
            A :class:`~precision_tensorflow.checkpoints.Checkpoints`: ``save(step, model, optimizer, extra=...)``,
            ``restore(model, optimizer)``, and for ``fit`` its ``callback(save_every=...)``.
        """
        return Checkpoints(directory, keep, keras_file=keras_file)

    def callback(self, every: int | None = None) -> LossScaleCallback:
        """A Keras callback that logs scale and skipped steps and raises after too many skips in a row."""
        return LossScaleCallback(every)
