"""The conformance kit passes a right backend, and finds each way to be wrong with the check that is about it."""

import dataclasses

import numpy as np
import pytest

import precision
from precision.loss_scale import next_state
from precision.testing.conformance import CHECKS, run
from precision.testing.conformance.kit import NotConformingError
from tests.core.numpy_backend import NumpyBackend, NumpyLossScaler, NumpyParity, NumpyPolicy
from tests.kit_in_pytest import run_kit


def backend(scaler=None, policy=None, adapter=None, **members):
    """A NumPy backend with some methods replaced."""
    loss_scaler = type("Scaler", (NumpyLossScaler,), scaler or {})
    bound = type("Bound", (NumpyPolicy,), {"scaler_type": loss_scaler, **(policy or {})})
    side = type("Side", (NumpyParity,), adapter or {})
    return type("Mine", (NumpyBackend,), {"policy_type": bound, "adapter_type": side, **members})()


def test_a_right_backend_conforms_and_what_it_lacks_is_named():
    report = run(NumpyBackend())
    assert report.passed and report.require() is report, str(report)
    missing = {result.name: result.message for result in report.results if result.outcome == "not offered"}
    assert len(report.results) == len(CHECKS) == 18
    assert set(missing.values()) == {"the backend does not train"}
    assert len(missing) == 3
    assert "15 passed, 3 not offered" in str(report)


def test_it_is_found_by_name():
    precision.register_backend("numpy", NumpyBackend)
    try:
        assert run("numpy", only="island").passed
    finally:
        precision.unregister_backend("numpy")
    with pytest.raises(precision.BackendNotFoundError):
        run("numpie")
    with pytest.raises(precision.UnsupportedError, match="no check's name"):
        run(NumpyBackend(), only="no such check")
    with pytest.raises(precision.UnsupportedError, match="ParityAdapter"):
        run(backend(parity=lambda self: object()))


def in_its_own_dtype(self, loss, state):
    return loss * loss.dtype.type(state.scale)


def with_the_old_flag(self, grads, state):
    out, _ = NumpyLossScaler.unscale(self, grads, state)
    return out, np.bool_(np.isfinite(next(iter(grads.values()))).all())  # of the first gradient only


def by_division(self, grads, state):
    _, finite = NumpyLossScaler.unscale(self, grads, state)
    return {k: g.astype(np.float32) / state.scale for k, g in grads.items()}, finite


def always_looking(self, grads, state):
    finite = np.bool_(all(np.isfinite(g).all() for g in grads.values()))
    return {k: g.astype(np.float32) / state.scale for k, g in grads.items()}, finite


def one_late(self, state, finite):
    config = (
        self.config.with_(growth_interval=self.config.growth_interval + 1)
        if self.config.mode == "dynamic"
        else self.config
    )
    return next_state(config, state, finite, np)


def casting_integers(self, leaf, dtype):
    return leaf.astype(np.float16) if isinstance(leaf, np.ndarray) else leaf


def truncating(self, values, dtype):
    return NumpyParity.round_to(self, values * np.float32(0.999), dtype)


def in_low_precision(self, mp, case, family, inputs):
    result = NumpyParity.run_op(self, mp, case, family, inputs)
    return dataclasses.replace(result, values=result.values * 1.05)


def uncast(self, mp, case, family, inputs):
    result = NumpyParity.run_op(self, mp, case, family, inputs)
    return dataclasses.replace(result, input_dtypes=tuple(a.dtype.name for a in inputs))


def first_replica_only(self, flags):
    return flags[0]


WRONG = {
    "it has a name": backend(versions=lambda self: {}),
    "it binds": backend(bind=lambda self, policy, **options: NumpyPolicy(policy, self)),
    "casts round": backend(policy={"cast": casting_integers}),
    "another framework's tensor": backend(policy={"cast": lambda self, leaf, dtype: leaf}),
    "an island": backend(policy={"island": lambda self, dtype="float32": lambda function: function}),
    "ops are cast": backend(adapter={"run_op": uncast}),
    "rounding is": backend(adapter={"round_to": truncating}),
    "ops are exact": backend(adapter={"run_op": in_low_precision}),
    "the loss is scaled": backend(scaler={"scale": in_its_own_dtype}),
    "unscaling gives": backend(scaler={"unscale": with_the_old_flag}),
    "unscaling gives float32 and": backend(scaler={"unscale": by_division}),
    "with mode none": backend(scaler={"unscale": always_looking}),
    "the scale moves": backend(scaler={"update": one_late}),
    "states save": backend(scaler={"load_state_dict": lambda self, saved: self.init()}),
    "a run that only skips": backend(scaler={"check": lambda self, state: None}),
    "an overflow on any replica": backend(adapter={"agree": first_replica_only}),
}


@pytest.mark.parametrize("begins", WRONG)
@pytest.mark.filterwarnings("ignore:overflow")
def test_each_fault_is_found_by_the_check_that_is_about_it(begins):
    report = run(WRONG[begins])
    failed = [result.name for result in report.results if result.outcome == "failed"]
    assert any(name.startswith(begins) for name in failed), str(report)
    with pytest.raises(NotConformingError, match=begins):
        report.require()


def test_what_a_backend_raises_is_a_failure_that_says_where():
    def broken(self, dtype="float32"):
        raise RuntimeError("not written")

    report = run(backend(policy={"island": broken}), only="island")
    assert report.results[0].outcome == "failed"
    assert "RuntimeError: not written" in report.results[0].message
    assert "test_conformance.py" in report.results[0].message


def test_adapters_train_all_models_unless_they_say_otherwise():
    from precision.parity.adapter import ParityAdapter
    from precision.parity.models import MODELS

    assert ParityAdapter.models == MODELS


def test_pytest_runs_it_for_a_class_that_is_not_registered(tmp_path):
    done = run_kit(tmp_path, "tests.core.numpy_backend:NumpyBackend", timeout=120)
    assert "15 passed, 3 skipped" in done.stdout, done.stdout
    assert "the backend does not train" in done.stdout
