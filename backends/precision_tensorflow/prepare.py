"""``mp.prepare(model)``: a model whose results leave in the output dtype and whose statistics survive skipped steps."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from precision.errors import PolicyError, PrecisionWarning, UnsupportedError
from precision.policy import PrecisionPolicy
from precision_tensorflow.guard import guard_steps
from precision_tensorflow.paths import unmatched


def output_layer(policy: PrecisionPolicy, name: str | None = None) -> keras.layers.Layer:
    """A linear ``Activation`` in the output dtype: it casts what comes in and does nothing else."""
    return keras.layers.Activation("linear", dtype=policy.output_dtype, name=name)


def prepare(policy: PrecisionPolicy, model: keras.Model, *, guard: bool = True) -> keras.Model:
    """Check a model against the policy and mend what Keras leaves open.

    * A Sequential or functional model whose outputs are in another dtype gets a casting layer after each; the weights
      are shared, and the model that is returned is the one to compile. A subclassed model cannot be extended from
      outside: end its ``call`` with ``mp.cast_to_output(...)``.
    * With ``guard`` and a loss scale that can skip steps, training steps put BatchNorm statistics and other
      non-trainable state back when they are skipped. A model loaded from a file is prepared again.
    * Module rules that match no layer are warned of.

    Args:
        policy: the policy.
        model: a built Keras model.
        guard: whether skipped steps restore non-trainable state.

    Returns:
        The model itself, or one that shares its layers.

    Raises:
        PolicyError: not a Keras model, or not built yet.
        UnsupportedError: the model's outputs are known to be in another dtype and cannot be extended.
    """
    if not isinstance(model, keras.Model):
        raise PolicyError(f"mp.prepare takes a keras.Model, not {type(model).__name__}.")
    if not model.built:
        raise PolicyError(
            "mp.prepare needs a built model: call it on a batch first, or start it with keras.Input, or call build()."
        )
    _warn_unmatched(policy, model)
    prepared = _with_outputs(policy, model)
    if guard and policy.loss_scale.mode != "none":
        guard_steps(prepared)
    return prepared


def _with_outputs(policy: PrecisionPolicy, model: keras.Model) -> keras.Model:
    outputs = getattr(model, "outputs", None)
    if not outputs:
        return model
    if all(_as_wished(tensor, policy) for tensor in outputs):
        return model
    if model.compiled:
        raise PolicyError(
            "mp.prepare adds layers to this model, which is compiled already: prepare first, then compile."
        )
    if isinstance(model, keras.Sequential):
        layers = list(model.layers)
        return keras.Sequential([keras.Input(batch_shape=model.input_shape, dtype=model.inputs[0].dtype), *layers,
                                 output_layer(policy, "output_cast")], name=model.name)  # fmt: skip
    if type(model) is not _functional_type():
        raise UnsupportedError(
            f"{type(model).__name__} is a model class of its own, whose outputs leave in "
            f"{', '.join(sorted({t.dtype for t in outputs}))}; mp.prepare would lose the class. End it with "
            "mp.output_layer() instead."
        )
    cast = [
        tensor
        if _as_wished(tensor, policy)
        else output_layer(policy, f"output_cast_{i}" if i else "output_cast")(tensor)
        for i, tensor in enumerate(outputs)
    ]
    return keras.Model(model.inputs, keras.tree.pack_sequence_as(model.output, cast), name=model.name)


def _functional_type() -> type[Any]:
    x = keras.KerasTensor((None, 1))
    return type(keras.Model(x, keras.layers.Identity()(x)))


def _as_wished(tensor: Any, policy: PrecisionPolicy) -> bool:
    return (
        tensor.dtype == policy.output_dtype
        or not keras.backend.is_float_dtype(tensor.dtype)
        or tensor.dtype == "float64"
    )


def _warn_unmatched(policy: PrecisionPolicy, model: keras.Model) -> None:
    paths = [layer.path for layer in model._flatten_layers(include_self=False) if layer.path]
    for rule in unmatched(policy, paths):
        shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
        warnings.warn(
            f"rule {rule.module!r} matched nothing in the model's layers: {shown}", PrecisionWarning, stacklevel=4
        )
