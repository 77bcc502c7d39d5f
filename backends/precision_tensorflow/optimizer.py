"""``PrecisionLossScaleOptimizer``: a Keras ``LossScaleOptimizer`` that moves its scale by the neutral rule.

It wraps any Keras optimizer. Everything it remembers is an optimizer variable, so ``.keras`` files and
``tf.train.Checkpoint`` carry it; everything it was told is in ``get_config``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from precision.errors import LossScaleError, PolicyError, UnsupportedError
from precision.formats import canonical_dtype
from precision.loss_scale import LossScale, LossScaleState, next_state, state_from_dict, state_to_dict
from precision_tensorflow import replicas
from precision_tensorflow.graphs import plain
from precision_tensorflow.guard import active_guards, restore
from precision_tensorflow.masters import MasterWeights
from precision_tensorflow.nonfinite import NonFiniteRecord
from precision_tensorflow.optimizer_inputs import filled, native_state, require_clipping, require_plain, tensor_or_none
from precision_tensorflow.scaler import TensorFlowLossScaler, scale_loss, unscale

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


@keras.saving.register_keras_serializable(package="precision")
class PrecisionLossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scale the loss, unscale and check the gradients, skip the step or take it, and move the scale.

    A skipped step leaves the model's variables, the inner optimizer's slots and its ``iterations`` as they were, and
    restores what :class:`~precision_tensorflow.guard.StateGuard` guards. With ``gradient_accumulation_steps`` set on
    the inner optimizer a non-finite micro-batch is left out of the accumulation, which then takes one more.

    Under ``tf.distribute`` gradients are summed over the replicas first (Keras's ``fit`` divides the loss by their number;
    a loop of your own has to), then unscaled, checked, clipped and applied, or skipped, on all replicas alike.

    Args:
        inner_optimizer: a Keras optimizer.
        loss_scale: a :class:`~precision.LossScale`, or the mapping it is saved as.
        name: of the optimizer.
        clipnorm, global_clipnorm, clipvalue: clip the unscaled gradients before the inner optimizer sees them (what is
            set on the inner optimizer clips unscaled gradients as well). At most one. With a global norm, here or
            inside, a norm beyond float32's range counts as an overflow.
        master_weights: with float16 or bfloat16 trainable variables, True keeps float32 copies that are updated and
            then rounded into the variables; False trains without; None refuses such variables.
        reduce_dtype: what gradients are summed over replicas in (wider ones in their own); they are cast to it for the
            sum, scaled as they are, and back to float32.

    Raises:
        PolicyError: a setting is not valid.
        MasterWeightsError: on building, low-precision variables and ``master_weights`` left None.

    Example:
        >>> optimizer = PrecisionLossScaleOptimizer(keras.optimizers.Adam(), {"mode": "dynamic"})
        >>> optimizer.state_dict()["scale"]
        65536.0
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        loss_scale: LossScale | Mapping[str, Any],
        name: str | None = None,
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        clipvalue: float | None = None,
        master_weights: bool | None = None,
        reduce_dtype: str = "float32",
        **kwargs: Any,
    ) -> None:
        if kwargs:
            known = "clipnorm, global_clipnorm, clipvalue, master_weights, reduce_dtype, name"
            raise PolicyError(
                f"{next(iter(kwargs))} is not a setting of the wrapper ({known}): set it on the optimizer inside."
            )
        config = loss_scale if isinstance(loss_scale, LossScale) else LossScale(**loss_scale)
        require_plain(inner_optimizer)
        require_clipping(clipnorm=clipnorm, global_clipnorm=global_clipnorm, clipvalue=clipvalue)
        super().__init__(inner_optimizer, config.initial_scale, config.growth_interval, name=name)
        self.clipnorm, self.global_clipnorm, self.clipvalue = clipnorm, global_clipnorm, clipvalue
        self.master_weights = master_weights
        self.reduce_dtype = canonical_dtype(reduce_dtype)
        self._config = config
        self._masters: MasterWeights | None = None
        self._nonfinite: NonFiniteRecord | None = None
        self._loss_was_scaled = False
        self._eager_steps = 0
        # int64 counters, as Keras's own: they have GPU kernels, where int32 ones live on the host.
        self.step_counter = self._scalar("step_counter", "int64", 0)
        self.dynamic_scale = self._scalar("dynamic_scale", "float32", config.initial_scale)
        self.hysteresis_left = self._scalar("hysteresis_left", "int64", config.hysteresis)
        self.skipped = self._scalar("skipped", "int64", 0)
        self.consecutive_skips = self._scalar("consecutive_skips", "int64", 0)

    def _scalar(self, name: str, dtype: str, value: float) -> keras.Variable:
        return self.add_variable((), keras.initializers.Constant(value), dtype, "only_first_replica", name=name)

    # ---- what Keras calls ----------------------------------------------------------------------------------------

    @plain
    def build(self, var_list: Sequence[Any]) -> None:
        """Create the inner optimizer's variables, and master weights where they are kept."""
        if self.built:
            return
        variables = list(var_list)
        self._masters = MasterWeights(self, variables, self.master_weights)
        self.inner_optimizer.build(self._masters.of(variables))
        keras.Optimizer.build(self, variables)
        if self._config.max_consecutive_skips is not None:
            self._nonfinite = NonFiniteRecord([getattr(v, "path", v.name) for v in variables])

    @plain
    def scale_loss(self, loss: Any) -> Any:
        """Multiply the loss by the scale, in float32 (or the loss's wider dtype). Compute gradients of the result."""
        if self._config.mode == "none":
            return loss
        self._loss_was_scaled = True
        return scale_loss(loss, self.dynamic_scale.value)

    @plain
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Unscale gradients of the scaled loss, then take or skip the step, then move the scale.

        Args:
            grads: one a variable; tensors, ``tf.IndexedSlices`` or None.
            trainable_variables: the variables; left out, those the optimizer was built on.

        Raises:
            LossScaleError: no loss was ever scaled by this optimizer.
            MixedFrameworksError: a gradient is another framework's tensor.
            NonFiniteGradientsError: in eager code, more skips in a row than allowed (looked at now and then).
        """
        grads = [tensor_or_none(grad) for grad in grads]
        if not grads:
            return
        variables = self._known(grads, trainable_variables)
        guards = active_guards()
        scaled = self._config.mode != "none"
        several = replicas.require_ready(self, scaled)
        if scaled and not self._loss_was_scaled:
            raise LossScaleError(
                "gradients were applied but no loss was scaled: they would be divided by a scale they were never "
                "multiplied with. Differentiate optimizer.scale_loss(loss), or loss * optimizer.scale."
            )
        checked = [
            None if self._overwrite_variable_with_gradient(v) else g for g, v in zip(grads, variables, strict=True)
        ]
        own = checked
        if several:
            keep_dtype = not scaled and (self._masters is None or not self._masters.kept)
            checked = replicas.summed(own, self.reduce_dtype, keep_dtype)
        if not scaled:
            ready = filled(checked, grads)
            replicas.step(self._take, (ready, variables), self.inner_optimizer)
            return
        state = self._state()
        unscaled, finite = unscale(self._config, checked, state.scale)
        if self.global_clipnorm or self.inner_optimizer.global_clipnorm:
            # Keras's clipping makes NaN of gradients whose norm is infinite.
            finite = finite & tf.math.is_finite(tf.linalg.global_norm(unscaled))
        self._branch(replicas.agreed(finite), own, unscaled, filled(unscaled, grads), variables, guards)

    def _branch(
        self,
        finite: Any,
        own: list[Any],
        unscaled: list[Any],
        ready: list[Any],
        variables: list[Any],
        guards: list[Any],
    ) -> None:
        """Take the step or skip it, and move the state, by a flag that is the same on all replicas."""
        record = self._nonfinite
        noted = [] if record is None else [own if record.replicas > 1 else [], unscaled]
        places = [] if record is None else [self._get_variable_index(v) for v in variables]

        def skip(snapshots: list[Any], *gradients: list[Any]) -> None:
            restore(guards, snapshots)
            if record is not None:
                record.write(places, *gradients)

        def after(flag: Any) -> None:
            self._assign_state(next_state(self._config, self._state(), flag, tf))
            self._check_now_and_then()

        snapshots = [guard.snapshot for guard in guards]
        replicas.branch(finite, self._take, (ready, variables), skip, (snapshots, *noted), after, self.inner_optimizer)

    @plain
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """:meth:`apply` on pairs of gradient and variable. Returns the inner optimizer's step count."""
        pairs = list(grads_and_vars)
        if pairs:
            self.apply(*zip(*pairs, strict=True))
        return self.inner_optimizer.iterations

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Keras has no stateless optimizers on TensorFlow. Always raises ``UnsupportedError``."""
        raise UnsupportedError(
            "stateless_apply: Keras does not support it on the TensorFlow backend. Use apply or apply_gradients, or "
            "mp.loss_scaler, whose state is explicit."
        )

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """What Keras calls at the end of ``fit``: EMA's last overwrite, and the check on consecutive skips."""
        variables = list(var_list)
        if self._masters is None or not self._masters.kept:
            self.inner_optimizer.finalize_variable_values(variables)
        else:
            self._masters.read_in(variables)
            self.inner_optimizer.finalize_variable_values(self._masters.of(variables))
            self._masters.write_back(variables)
        self.check()

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Leave variables out of the inner optimizer's weight decay; before it is built, as in Keras."""
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrecisionLossScaleOptimizer:
        """A copy for the same variables, with scale, counters, master weights and inner slots of its own."""
        copy = self.from_config(self.get_config())
        copy._loss_was_scaled, copy._eager_steps = self._loss_was_scaled, self._eager_steps
        if self.built:
            copy.build(self._trainable_variables)
        elif self.inner_optimizer.built:  # it was a native run's
            copy.inner_optimizer.build(self.inner_optimizer._trainable_variables)
        for target, source in zip(copy.variables, self.variables, strict=True):
            target.assign(source)
        memo[id(self)] = copy
        return copy

    def get_config(self) -> dict[str, Any]:
        """Settings as plain values; ``from_config`` makes an equal optimizer of them."""
        clipping = {name: getattr(self, name) for name in _CLIPPING if getattr(self, name) is not None}
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "loss_scale": self._config.effective(),
            "master_weights": self.master_weights,
            "reduce_dtype": self.reduce_dtype,
            **clipping,
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> PrecisionLossScaleOptimizer:
        """Make an optimizer from ``get_config``'s values."""
        settings = dict(config)
        inner = keras.saving.deserialize_keras_object(settings.pop("inner_optimizer"), custom_objects=custom_objects)
        return cls(inner, **settings)

    # ---- the state -----------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> LossScale:
        """The settings."""
        return self._config

    @property
    def scale(self) -> Any:
        """The scale as a float32 tensor."""
        self._loss_was_scaled = True  # whoever reads it may multiply the loss with it
        return tf.convert_to_tensor(self.dynamic_scale.value)

    def state_dict(self) -> dict[str, float | int]:
        """The loss-scale state as the flat dict every backend shares. Reads the device."""
        return state_to_dict(self._state())

    def load_state_dict(self, saved: Mapping[str, Any] | keras.optimizers.LossScaleOptimizer) -> None:
        """Load a state saved under any backend, a native one, or that of a Keras ``LossScaleOptimizer``.

        Raises:
            StateError: not a loss-scale state, of another version, or truncated. Nothing is changed then.
        """
        if isinstance(saved, PrecisionLossScaleOptimizer):
            saved = saved.state_dict()
        elif isinstance(saved, keras.optimizers.LossScaleOptimizer):
            saved = native_state(saved)
        elif isinstance(saved, Mapping):
            saved = {key: value.numpy() if hasattr(value, "numpy") else value for key, value in saved.items()}
        self._assign_state(state_from_dict(self._config, saved))

    def check(self) -> None:
        """Raise ``NonFiniteGradientsError`` if more steps in a row were skipped than allowed. Reads the device.

        Under several replicas and workers all hold the same state, so that all of them raise at the same step; what they
        name was gathered from all when the last step was skipped.
        """
        if self._config.max_consecutive_skips is not None:
            record = self._nonfinite
            TensorFlowLossScaler(self._config).check(self._state(), () if record is None else record.tensors)

    def _state(self) -> LossScaleState:
        variables = (self.dynamic_scale, self.step_counter, self.hysteresis_left, self.skipped, self.consecutive_skips)
        return LossScaleState(*(tf.convert_to_tensor(v.value) for v in variables))

    def _assign_state(self, state: LossScaleState) -> None:
        self.dynamic_scale.assign(state.scale)
        self.step_counter.assign(state.good_steps)
        self.hysteresis_left.assign(state.hysteresis_left)
        self.skipped.assign(state.skipped)
        self.consecutive_skips.assign(state.consecutive_skips)

    # ---- taking a step -------------------------------------------------------------------------------------------

    def _known(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> list[Any]:
        if trainable_variables is None:
            if not self.built:
                raise LossScaleError(
                    "apply(grads) without variables needs a built optimizer: call build(variables) first."
                )
            variables = list(self._trainable_variables)
        else:
            variables = list(trainable_variables)
            if not self.built:
                with keras.name_scope(self.name):
                    self.build(variables)
        if len(variables) != len(grads):
            raise LossScaleError(f"{len(grads)} gradients were given for {len(variables)} variables.")
        return variables

    @plain
    def _take(self, grads: list[Any], variables: list[Any]) -> None:
        if self.clipnorm or self.global_clipnorm or self.clipvalue:
            grads = self._clip_gradients(grads)
        masters = self._masters if self._masters is not None and self._masters.kept else None
        if masters is not None:
            masters.read_in(variables)
        with replicas.sums_done(self.inner_optimizer) if replicas.count() > 1 else contextlib.nullcontext():
            self.inner_optimizer.apply(grads, variables if masters is None else masters.of(variables))
        if masters is not None:
            masters.write_back(variables)

    def _check_now_and_then(self) -> None:
        limit = self._config.max_consecutive_skips
        if limit is not None and tf.executing_eagerly():
            self._eager_steps += 1
            if self._eager_steps % limit == 0:
                self.check()
