"""Keeps AutoGraph out of the library's own functions, and our errors our own when a graph is being traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from precision.errors import PrecisionError

Function = TypeVar("Function", bound=Callable[..., Any])


def plain(function: Function) -> Function:
    """Decorate a function that AutoGraph has nothing to convert in: left to it, every trace would take longer.

    AutoGraph also turns an exception it does not know into a ``StagingError``; ours are marked to pass through.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PrecisionError as error:
            error.ag_pass_through = True  # type: ignore[attr-defined]
            raise

    return tf.autograph.experimental.do_not_convert(run)  # type: ignore[no-any-return]
