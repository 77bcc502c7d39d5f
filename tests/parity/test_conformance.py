"""The three built-in backends pass the conformance kit as a third party runs it, and its training checks can fail."""

import dataclasses

import numpy as np
import pytest

from precision.testing.conformance import run
from tests.kit_in_pytest import run_kit
from tests.parity.conftest import BACKENDS


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_conforms(name, tmp_path):
    done = run_kit(tmp_path, name)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "18 passed" in done.stdout and "skipped" not in done.stdout


def test_without_a_backend_pytest_says_what_to_set(tmp_path):
    done = run_kit(tmp_path, timeout=120)
    assert done.returncode != 0
    assert "PRECISION_BACKEND=NAME pytest --pyargs" in done.stdout


ANOTHER = iter(np.linspace(0.0, 1e-3, 50).tolist())


def spoilt(change):
    """The torch backend, whose training results are changed before the kit sees them."""
    from precision_torch import TorchBackend
    from precision_torch.parity import TorchParity

    class Side(TorchParity):
        def train(self, spec):
            return change(spec, super().train(spec))

    return type("Spoilt", (TorchBackend,), {"parity": lambda self: Side(self)})()


def moved(spec, result):
    name = (
        next(name for name in result.weights if name.endswith(".mean"))
        if spec.model == "cnn"
        else next(iter(result.weights))
    )
    return dataclasses.replace(result, weights={**result.weights, name: result.weights[name] + np.float32(1e-6)})


@pytest.mark.parametrize(
    ("only", "change", "says"),
    [
        ("training skips", moved, "changed though every step was skipped"),
        ("training skips", lambda s, r: dataclasses.replace(r, skipped=[False] * len(r.skipped)), "it skipped"),
        ("training under", lambda s, r: dataclasses.replace(r, scales=[2 * x for x in r.scales]), "not the rule's"),
        ("training under", lambda s, r: dataclasses.replace(r, losses=r.losses[::-1]), "the loss goes from"),
        (
            "training under",
            lambda s, r: dataclasses.replace(r, losses=[*r.losses[:-1], next(ANOTHER)]),
            "second time",
        ),
    ],
)
def test_the_checks_on_training_can_fail(only, change, says):
    report = run(spoilt(change), only=only, steps=12)
    assert [result.outcome for result in report.results] == ["failed"]
    assert says in report.results[0].message


def test_a_backend_that_trains_in_float16_without_a_loss_scale_is_found():
    from precision_torch import TorchBackend
    from precision_torch.parity import TorchParity

    class Side(TorchParity):
        def train(self, spec):  # does as if it had trained
            return spec.weights

    backend = type("Careless", (TorchBackend,), {"parity": lambda self: Side(self)})()
    report = run(backend, only="float16 computation without loss scaling")
    assert [result.outcome for result in report.results] == ["failed"]
    assert "must raise PolicyError" in report.results[0].message
