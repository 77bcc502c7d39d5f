"""Several replicas under ``tf.distribute``: gradients are summed, the flag is agreed on, and only then comes a branch.

Nothing that replicas do together lies in a branch that one of them could leave out: the condition of every branch is the
agreed flag. Keras clips, checks and branches before it sums; here the sum comes first, so that all see the same numbers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from precision.errors import LossScaleError, UnsupportedError
from precision_tensorflow.cadence import on_each_replica

_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
_REFUSED = (
    (tf.distribute.experimental.ParameterServerStrategy, "its workers step at different times, so that none can agree"),
    (tf.distribute.experimental.CentralStorageStrategy, "it is experimental in TensorFlow, and has not been tried here"),
    (tf.distribute.TPUStrategy, "it has not been tried here; TPUs compute in bfloat16, which needs no loss scale"),
)  # fmt: skip

_threads = threading.local()


def count() -> int:
    """The number of replicas that step together under the strategy in force."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def require_ready(optimizer: Any, scaled: bool) -> bool:
    """Refuse a strategy, or a place in it, where a step could not be right. True if there are several replicas.

    Args:
        optimizer: the wrapping optimizer.
        scaled: whether its loss scale can skip steps.

    Raises:
        UnsupportedError: the strategy, or a setting of the inner optimizer under it.
        LossScaleError: the optimizer was made outside the strategy's scope, or is applied outside ``strategy.run``.
    """
    strategy = tf.distribute.get_strategy()
    for kind, why in _REFUSED if scaled else ():
        if isinstance(strategy, kind):
            raise UnsupportedError(
                f"loss scaling under {type(strategy).__name__}: {why}. Use MirroredStrategy, MultiWorkerMirroredStrategy, "
                "OneDeviceStrategy or none; or loss_scale.mode = 'none'."
            )
    if count() == 1 or not isinstance(strategy, _MIRRORED):
        return False
    for part in (optimizer, optimizer.inner_optimizer):
        if part._distribution_strategy is not strategy:
            raise LossScaleError(
                f"the optimizer ({type(part).__name__}) was made outside strategy.scope() of the {type(strategy).__name__} "
                "that it steps in, so that its state is not one on all replicas. Make model and optimizer inside the scope."
            )
    if tf.distribute.get_replica_context() is None:
        raise LossScaleError("apply and apply_gradients belong into the function given to strategy.run, not around it.")
    return True


def require_no_keras_distribution() -> None:
    """Refuse ``keras.distribution``: on TensorFlow Keras takes it without a word and trains on one device."""
    if keras.distribution.distribution() is not None:
        raise UnsupportedError(
            "keras.distribution has no effect on Keras's TensorFlow backend: the model would train on one device. Unset it "
            "(keras.distribution.set_distribution(None)) and use a tf.distribute strategy."
        )


def summed(grads: Sequence[Any], dtype: str, keep_dtype: bool) -> list[Any]:
    """Sum gradients over the replicas, in replica context.

    Args:
        grads: tensors, ``tf.IndexedSlices`` (whose rows are gathered) or None.
        dtype: floating gradients up to 32 bits are summed in it; wider and complex ones in their own.
        keep_dtype: whether sums come back in the gradients' dtypes; otherwise in float32 or wider.
    """
    at = [i for i, grad in enumerate(grads) if grad is not None]
    if not at:
        return list(grads)
    sent = [_cast(grads[i], dtype) if _narrow(grads[i]) else grads[i] for i in at]
    sums = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sent)
    out = list(grads)
    for i, total in zip(at, sums, strict=True):
        back = grads[i].dtype if keep_dtype or not _narrow(grads[i]) else tf.float32
        out[i] = _cast(total, back)
    return out


def agreed(finite: Any) -> Any:
    """Whether a flag holds on all replicas: one all-reduce of a float32 scalar, 1 where it does not."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return finite
    return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(finite, 0.0, 1.0)), 0.0)


def branch(
    finite: Any,
    take: Callable[..., None],
    args: tuple[Any, ...],
    skip: Callable[..., None],
    skip_args: tuple[Any, ...],
    after: Callable[[Any], None],
    inner: Any,
) -> None:
    """Take or skip a step, and then do what follows either.

    A strategy that merges replicas to update its variables cannot do so inside a branch: there the branch itself is
    entered across replicas, as Keras's own optimizer does.

    Args:
        finite: bool scalar tensor, the same on all replicas.
        take: called with ``args`` in replica context when ``finite`` holds.
        args: tensors and variables of the step.
        skip: called with ``skip_args`` otherwise; across replicas where they are merged, in replica context elsewhere.
        skip_args: tensors, in lists.
        after: called with the flag once a process, where replicas are merged; once a replica elsewhere.
        inner: the optimizer that ``take`` applies.
    """
    context = tf.distribute.get_replica_context()
    if context is None or tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(finite, lambda: take(*args), lambda: skip(*skip_args))
        after(finite)
        return

    def across(strategy: Any, flags: Any, merged: tuple[Any, ...], skipped: tuple[Any, ...]) -> None:
        flag = strategy.experimental_local_results(flags)[0]
        tf.cond(flag, lambda: on_each_replica(inner, strategy, take, merged), lambda: skip(*skipped))
        after(flag)

    context.merge_call(across, args=(finite, args, skip_args))


def step(take: Callable[..., None], args: tuple[Any, ...], inner: Any) -> None:
    """Take a step that cannot be skipped; arguments as for :func:`branch`."""
    context = tf.distribute.get_replica_context()
    if count() == 1 or context is None or tf.__internal__.distribute.strategy_supports_no_merge_call():
        take(*args)
    else:
        context.merge_call(lambda strategy, merged: on_each_replica(inner, strategy, take, merged), args=(args,))


def write_back(variable: Any, value: Any) -> None:
    """Assign to each replica's copy of a variable that replica's own value, whatever the variable's aggregation."""
    native = getattr(variable, "value", variable) if not isinstance(variable, tf.Variable) else variable
    strategy = tf.distribute.get_strategy()
    if tf.distribute.in_cross_replica_context() and _distributed(native):
        strategy.extended.update(native, _assign, args=(value,), group=False)
    else:
        native.assign(strategy.experimental_local_results(value)[0] if _distributed(value) else value)


def _assign(variable: Any, value: Any) -> None:
    variable.assign(value)


def _distributed(value: Any) -> bool:
    return isinstance(value, tf.distribute.DistributedValues)


@contextlib.contextmanager
def sums_done(optimizer: Any) -> Iterator[None]:
    """While an inner optimizer applies gradients that are sums over all replicas already: it does not sum them again.

    Keras's optimizers sum in one method of theirs; it is replaced on the instance (once), and gives way in this thread
    within this context only.

    Raises:
        UnsupportedError: the optimizer does not sum there, so that its gradients would be summed twice.
    """
    method = getattr(optimizer, "_all_reduce_sum_gradients", None)
    if method is None:
        raise _sums_elsewhere(optimizer)
    if not getattr(method, "_precision_once", False):
        optimizer._all_reduce_sum_gradients = _once(method)
    outer, _threads.passed = getattr(_threads, "passed", None), []
    try:
        yield
        if not _threads.passed:
            raise _sums_elsewhere(optimizer)
    finally:
        _threads.passed = outer


def _once(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def all_reduce_sum_gradients(grads_and_vars: Any) -> Any:
        passed = getattr(_threads, "passed", None)
        if passed is None:
            return method(grads_and_vars)
        passed.append(True)
        return list(grads_and_vars)

    all_reduce_sum_gradients._precision_once = True  # type: ignore[attr-defined]
    return all_reduce_sum_gradients


def _sums_elsewhere(optimizer: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{type(optimizer).__name__} does not sum gradients over replicas where Keras's optimizers do, so they would be "
        "summed twice. Use an optimizer of keras.optimizers under several replicas."
    )


def _narrow(grad: Any) -> bool:
    return bool(grad.dtype.is_floating and grad.dtype.size <= 4)


def _cast(grad: Any, dtype: Any) -> Any:
    if grad.dtype == tf.as_dtype(dtype):
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(grad.values, dtype), grad.indices, grad.dense_shape)
    return tf.cast(grad, dtype)
