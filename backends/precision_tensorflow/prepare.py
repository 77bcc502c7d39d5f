"""``mp.prepare(model)``: a model whose results leave in the output dtype and whose statistics survive skipped steps."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras

from precision.errors import PolicyError, PrecisionWarning
from precision.policy import PrecisionPolicy
from precision_tensorflow.bias_gradients import warn_of_bias_gradients
from precision_tensorflow.casts import cast_tree
from precision_tensorflow.guard import guard_steps
from precision_tensorflow.multiworker import mend_fit
from precision_tensorflow.paths import unmatched
from precision_tensorflow.scope import PolicyScope


def output_layer(policy: PrecisionPolicy, name: str | None = None) -> keras.layers.Layer:
    """A linear ``Activation`` in the output dtype: it casts what comes in and does nothing else."""
    return keras.layers.Activation("linear", dtype=policy.output_dtype, name=name)


def prepare(
    policy: PrecisionPolicy,
    model: keras.Model,
    *,
    guard: bool = True,
    autocast: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> keras.Model:
    """Check a model against the policy and mend what Keras leaves open.

    * **Outputs.** A Sequential or functional model with outputs in another dtype is continued by a casting layer on
      each such output, named after it and the dtype (``head_float32``, and ``head_float32_1`` where one layer gives
      several outputs); layers and weights are shared, and it is the returned model that is to be compiled. A model class of its own gets its ``call`` wrapped in place.
    * **Statistics.** With a loss scale that can skip steps, every training step (``fit``, ``train_on_batch``) puts
      BatchNorm statistics and other non-trainable state back when it is skipped.
    * **Several workers.** ``fit`` runs under ``MultiWorkerMirroredStrategy``; see :mod:`.multiworker`.
    * **Op-level autocast.** With ``autocast`` the model's ``call`` goes through it, in ``fit``, ``evaluate``, ``predict`` and
      elsewhere; its layers stay float32 ones, and its results leave in the output dtype without another layer.
    * **Warnings.** A module rule that covers no layer, a model without any layer in the compute dtype (one made outside
      ``mp.scope()``), and layers whose bias gradient TensorFlow sums in bfloat16 on this device, are warned of.

    Wrapped calls and steps belong to the object, not to its file: prepare a loaded model again.

    Args:
        policy: the policy.
        model: a built Keras model, not compiled yet if outputs are to be added.
        guard: whether skipped steps put non-trainable state back.
        autocast: ``mp.autocast``, if ops are to be cast one by one rather than layers by their own policies.

    Returns:
        The model itself, or one that shares its layers.

    Raises:
        PolicyError: not a Keras model, not built yet, or compiled too early.
    """
    if not isinstance(model, keras.Model):
        raise PolicyError(f"mp.prepare takes a keras.Model, not {type(model).__name__}.")
    if not model.built:
        raise PolicyError(
            "mp.prepare needs a built model: call it on a batch first, or start it with keras.Input, or call build()."
        )
    if autocast is not None:
        prepared = _with_autocast(policy, model, autocast)
    else:
        _warn(policy, model)
        with PolicyScope(model.dtype_policy):  # a model made here keeps the policy of the one it is made from
            prepared = _with_outputs(policy, model)
    if guard and policy.loss_scale.mode != "none":
        guard_steps(prepared)
    mend_fit(prepared)
    return prepared


def _with_outputs(policy: PrecisionPolicy, model: keras.Model) -> keras.Model:
    outputs = getattr(model, "outputs", None)
    if outputs and all(_as_wished(tensor, policy) for tensor in outputs):
        return model
    if not outputs or not type(model).__module__.startswith("keras."):  # a class of the user's, or not functional
        return _with_cast_call(policy, model)
    if model.compiled:
        raise PolicyError(
            "mp.prepare adds output layers to this model, which is compiled already: prepare, then compile."
        )

    taken: Counter[str] = Counter()

    def cast(tensor: Any, name: str) -> Any:
        if _as_wished(tensor, policy):
            return tensor
        taken[name] += 1
        again = f"_{taken[name] - 1}" if taken[name] > 1 else ""
        return output_layer(policy, f"{name}_{policy.output_dtype}{again}")(tensor)

    if isinstance(model, keras.Sequential):
        layers = [*model.layers, output_layer(policy, f"{model.layers[-1].name}_{policy.output_dtype}")]
        return keras.Sequential([keras.Input(tensor=model.inputs[0]), *layers], name=model.name)
    named = [cast(tensor, name) for tensor, name in zip(outputs, model.output_names, strict=True)]
    return keras.Model(model.input, keras.tree.pack_sequence_as(model.output, named), name=model.name)


def _with_autocast(policy: PrecisionPolicy, model: keras.Model, autocast: Callable[..., Any]) -> keras.Model:
    """The same model, whose ``call`` is autocast op by op. Losses that layers add inside come out with its results."""
    layers = [layer for layer in model._flatten_layers(include_self=False) if layer.weights]
    low = [layer.path for layer in layers if layer.compute_dtype != "float32" and layer.compute_dtype != "float64"]
    if low:
        raise PolicyError(
            f"mp.prepare(autocast=True) casts op by op and takes float32 layers; {low[0]} computes in another dtype already. "
            "Make the model outside of mp.scope(), or leave autocast out."
        )
    inner = model.call
    if getattr(inner, "_precision_autocast", None) == policy:
        return model

    def whole(*args: Any, **kwargs: Any) -> Any:
        results = inner(*args, **kwargs)
        added = [loss for layer in model._flatten_layers() for loss in layer._losses]
        model._clear_losses()
        return results, added

    cast = autocast(whole)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten((args, kwargs))):
            return inner(*args, **kwargs)
        results, added = cast(*args, **kwargs)
        for loss in added:
            keras.layers.Layer.add_loss(model, loss)  # a functional model refuses its own
        return results

    call._precision_autocast = policy  # type: ignore[attr-defined]
    model.call = call
    model.train_function = model.test_function = model.predict_function = None  # made with the call as it was
    return model


def _with_cast_call(policy: PrecisionPolicy, model: keras.Model) -> keras.Model:
    inner = model.call
    if getattr(inner, "_precision_output", None) == policy.output_dtype:
        return model

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        return cast_tree(inner(*args, **kwargs), policy.output_dtype)

    call._precision_output = policy.output_dtype  # type: ignore[attr-defined]
    model.call = call
    model.train_function = model.test_function = model.predict_function = None  # made with the call as it was
    return model


def _as_wished(tensor: Any, policy: PrecisionPolicy) -> bool:
    dtype = tensor.dtype
    return dtype in (policy.output_dtype, "float64") or not keras.backend.is_float_dtype(dtype)


def _warn(policy: PrecisionPolicy, model: keras.Model) -> None:
    layers = [layer for layer in model._flatten_layers(include_self=False) if layer.path]
    paths = [layer.path for layer in layers]
    for rule in unmatched(policy, paths):
        shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
        warnings.warn(
            f"rule {rule.module!r} matched nothing in the model's layers: {shown}", PrecisionWarning, stacklevel=4
        )
    warn_of_bias_gradients(layers, stacklevel=4)
    computing = {layer.compute_dtype for layer in layers if layer.weights}
    if computing and policy.compute_dtype not in computing and not policy.module_rules:
        warnings.warn(
            f"no layer of the model computes in {policy.compute_dtype}, only in {', '.join(sorted(computing))}: create "
            "its layers inside `with mp.scope():`, or with dtype=mp.keras_policy().",
            PrecisionWarning,
            stacklevel=4,
        )
