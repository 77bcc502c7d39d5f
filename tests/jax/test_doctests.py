"""The examples in the docstrings of the JAX backend run and print what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["bound", "checkpoints", "clipping", "rounding", "scaler"])
def test_docstrings(name):
    module = importlib.import_module(f"precision_jax.{name}")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0 and result.attempted > 0
