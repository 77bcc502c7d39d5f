"""``mp.autocast``: a function of tensors whose traced graph is replayed under the policy, once for each input signature."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import resource_variable_ops

from precision.errors import PrecisionWarning
from precision.policy import PrecisionPolicy
from precision_tensorflow.graphs import plain
from precision_tensorflow.opcast import build, control, marks, record  # noqa: F401 - control registers its handlers
from precision_tensorflow.opcast.notes import F32, Value, castable
from precision_tensorflow.opcast.replay import Frame, Replayer
from precision_tensorflow.opcast.rules import Rules
from precision_tensorflow.paths import covers


def idle(policy: PrecisionPolicy) -> bool:
    """Whether a policy has nothing to do: then a function is left as it is."""
    return policy.compute_dtype == "float32" and policy.output_dtype == "float32" and not policy.rules


class Autocast:
    """A function whose ops run in the dtypes that the policy gives them.

    Args:
        policy: the policy.
        function: a Python function of tensors, a ``tf.function``, a Keras layer or model.
        device: the kind of device ops run on unless they say otherwise.
        native: whether products run in the device's own low-precision kernels.
        output: the dtype in which floating results leave; None leaves them as they come.
        recompute: whether softmax, norms and the like are computed again in the backward pass rather than kept in float32.
        jit_compile: as ``tf.function`` takes it; that of the function, if it is a ``tf.function``, unless given.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        function: Callable[..., Any],
        device: str,
        native: bool,
        output: str | None = None,
        recompute: bool = True,
        jit_compile: bool | None = None,
    ) -> None:
        self.policy, self.function, self.recompute = policy, function, recompute
        self.device, self.native = device, native
        self._output = None if output is None else tf.as_dtype(output)
        self._python, compiled, self._autograph = _unwrapped(function)
        self._told = threading.Lock(), set[Any]()
        if not isinstance(function, keras.layers.Layer):
            functools.update_wrapper(self, function, updated=())
        self._casts: bool | None = None
        run = self._run
        self._compiled = tf.function(
            _named(run, getattr(self, "__name__", type(function).__name__)),
            autograph=False,
            jit_compile=compiled if jit_compile is None else jit_compile,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if marks.tracing() or _symbolic(args, kwargs):
            return self.function(*args, **kwargs)  # what is being traced is replayed as a whole
        return self._compiled(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """The function for one input signature, as ``tf.function`` gives it."""
        return self._compiled.get_concrete_function(*args, **kwargs)

    @plain
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Trace and replay; runs while TensorFlow traces the function that is called."""
        flat = tf.nest.flatten((args, kwargs), expand_composites=True)
        places = [i for i, x in enumerate(flat) if tf.is_tensor(x) and not _is_variable(x)]
        tensors = [tf.convert_to_tensor(flat[i]) for i in places]
        if self._casts is None:
            self._casts = record.mentions_casts(self.function)

        def call(*given: Any) -> Any:
            leaves = list(flat)
            for place, tensor in zip(places, given, strict=True):
                leaves[place] = tensor
            inner_args, inner_kwargs = tf.nest.pack_sequence_as((args, kwargs), leaves, expand_composites=True)
            return self._python(*inner_args, **inner_kwargs)

        concrete, records = self._trace(call, tensors)
        rules = Rules(self.policy)
        replayer = Replayer(rules, records, self.device, self.native, self.recompute)
        graph = tf_ops.get_default_graph()
        build.keep(graph, concrete)
        for variable in concrete.graph.variables:
            resource_variable_ops.variable_accessed(variable)
        values = [Value(t, stored=True) for t in tensors]
        values += [Value(t, stored=True) for t in concrete.captured_inputs]
        with marks.replaying(), graph.name_scope(""):
            frame = Frame(replayer, concrete.graph)
            frame.run(values)
            self._warn(rules)
            return self._results(frame, concrete.graph)

    def _trace(self, call: Callable[..., Any], tensors: Sequence[Any]) -> tuple[Any, record.Records]:
        """Trace with floating inputs declared float32, as variables are; as they come, if the function will not have that."""
        code = call.__code__
        specs = [tf.TensorSpec(t.shape, F32 if castable(t.dtype) else t.dtype) for t in tensors]
        try:
            return record.trace(call, specs, code, bool(self._casts), self._autograph)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            given = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
            if given == specs:
                raise
            return record.trace(call, given, code, bool(self._casts), self._autograph)

    def _results(self, frame: Frame, graph: Any) -> Any:
        def leave(x: Any) -> Any:
            if not tf.is_tensor(x) or not hasattr(x, "graph"):
                return x
            value = frame.read(x)
            wanted = self._output or (value.dtype if not value.weak else x.dtype)
            return frame.cast(value, wanted) if castable(value.dtype) else value.tensor

        structure = graph.structured_outputs
        leaves = tf.nest.flatten(structure, expand_composites=True)
        return tf.nest.pack_sequence_as(structure, [leave(x) for x in leaves], expand_composites=True)

    def _warn(self, rules: Rules) -> None:
        lock, told = self._told
        with lock:
            for rule in self.policy.module_rules:
                if rule in told or any(covers(rule, name) for name in rules.seen):
                    told.add(rule)
                    continue
                told.add(rule)
                shown = ", ".join(list(rules.seen)[:8]) + (", ..." if len(rules.seen) > 8 else "")
                warnings.warn(
                    f"rule {rule.module!r} matched nothing in {getattr(self, '__name__', 'the model')}: its ops were made in "
                    f"{shown or 'no layer and no name scope'}.",
                    PrecisionWarning,
                    stacklevel=2,
                )


def _unwrapped(function: Any) -> tuple[Callable[..., Any], bool | None, bool]:
    """What to trace: of a ``tf.function`` the Python function, so that its ops are made where they can be followed."""
    if isinstance(function, tf.types.experimental.PolymorphicFunction) and function.input_signature is None:
        return function.python_function, function._jit_compile, bool(function._autograph)
    return function, None, not isinstance(function, keras.layers.Layer)


def _is_variable(x: Any) -> bool:
    return isinstance(x, (tf.Variable, keras.Variable))


def _symbolic(args: Any, kwargs: Any) -> bool:
    return any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten((args, kwargs)))


def _named(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    run.__name__ = name
    return run
