"""``mp.scope()``: the policy for layers created inside, restored afterwards, and carried into threads.

Keras keeps the default dtype policy in a ``threading.local`` of its own, so a new thread starts with float32 whatever
scope it was started in, and nothing but code running in that thread can change it. A scope therefore hands out what
runs there: ``wrap`` for a thread's target, ``attach`` for a pool's initializer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from precision_tensorflow import casts
from precision_tensorflow.opcast import marks

Function = TypeVar("Function", bound=Callable[..., Any])


class PolicyScope:
    """A dtype policy in force for layers created without ``dtype=``. Context manager and decorator, nestable, reusable.

    Safe to enter from several threads at once: each restores what it found.

    Args:
        policy: the Keras policy.

    Example:
        >>> with mp.scope() as scope:                                            # doctest: +SKIP
        ...     model = build()
        ...     thread = threading.Thread(target=scope.wrap(build_another))
        ...     pool = ThreadPoolExecutor(initializer=scope.attach)
    """

    def __init__(self, policy: keras.DTypePolicy) -> None:
        self.policy = policy
        self._local = threading.local()

    def __enter__(self) -> PolicyScope:
        former = getattr(self._local, "former", None)
        if former is None:
            former = self._local.former = []
        former.append(keras.config.dtype_policy())
        keras.config.set_dtype_policy(self.policy)
        return self

    def __exit__(self, *exc: object) -> None:
        keras.config.set_dtype_policy(self._local.former.pop())

    def __call__(self, function: Function) -> Function:
        return self.wrap(function)

    def wrap(self, function: Function) -> Function:
        """Return the function run under the policy in whatever thread calls it; that thread's own is restored after."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    def attach(self) -> None:
        """Put the policy in force in the calling thread until it ends. For ``ThreadPoolExecutor(initializer=...)``."""
        keras.config.set_dtype_policy(self.policy)


class Island(PolicyScope):
    """A dtype in force whatever is around: for layers created inside, and for a decorated function's floating inputs.

    Args:
        dtype: canonical dtype name.

    Example:
        >>> with mp.island("float32"):                       # doctest: +SKIP
        ...     head = keras.layers.Dense(10)
        >>> @mp.island("float32")                            # doctest: +SKIP
        ... def distance(a, b): return tf.reduce_sum((a - b) ** 2)
    """

    def __init__(self, dtype: str) -> None:
        super().__init__(keras.DTypePolicy(dtype))
        self.dtype = dtype

    def __enter__(self) -> Island:
        super().__enter__()
        region = marks.region(dtype=self.dtype)
        region.__enter__()
        self._local.regions = [*getattr(self._local, "regions", []), region]
        return self

    def __exit__(self, *exc: object) -> None:
        self._local.regions.pop().__exit__(None, None, None)
        super().__exit__(*exc)

    def __call__(self, function: Function) -> Function:
        cast = casts.island(self.dtype, function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:  # inside of mp.autocast the ops are marked, and what they take is cast when they are replayed
                return function(*args, **kwargs) if marks.tracing() else cast(*args, **kwargs)

        return run  # type: ignore[return-value]
