"""The examples in the backend's docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import precision_torch

MODULES = ["precision_torch", *(f"precision_torch.{m.name}" for m in pkgutil.iter_modules(precision_torch.__path__))]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_main_classes_have_examples():
    for name in ("bound", "grad_scaler", "optimizer", "regions", "loss_scaler", "step_result", "backend"):
        assert doctest.testmod(importlib.import_module(f"precision_torch.{name}")).attempted > 0
