"""Each backend works with the other frameworks absent: nothing of them can be imported."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .conftest import ROOT

BACKENDS = ("torch", "tensorflow", "jax")
# What each extra installs beside what the core needs; and what is commonly installed with a framework.
OWN = {
    "torch": ["torch"],
    "tensorflow": ["tensorflow", "keras"],
    "jax": ["jax", "jaxlib", "optax"],
}
LIBRARIES = ["flax", "equinox", "haiku", "orbax", "jmp", "sklearn", "psutil"]

BLOCKER = """
import sys

class Without:
    \"\"\"A finder that does not find the given packages: for imports and for whoever looks first, they are not installed.\"\"\"

    def __init__(self, finder, names):
        self.finder, self.names = finder, names

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.names else self.finder.find_spec(name, path, target)

    def __getattr__(self, attribute):
        return getattr(self.finder, attribute)

blocked = set(BLOCKED)
assert not [name for name in sys.modules if name.partition(".")[0] in blocked]
sys.meta_path[:] = [Without(finder, blocked) for finder in sys.meta_path]
"""

# The same tiny run on every backend, through its adapter: three steps of a small network, the second overflows.
TRAIN = """
import numpy as np
import precision
from precision.parity.adapter import TrainSpec
from precision.parity.models import initial_weights

backend = precision.get_backend(NAME)
mp = precision.bind("mixed_bfloat16", backend=NAME)
assert mp.backend is backend and mp.policy.compute_dtype == "bfloat16"

rng = np.random.default_rng(0)
policy = precision.PrecisionPolicy.from_name("mixed_float16")
weights = initial_weights("mlp")
result = backend.parity().train(TrainSpec(
    model="mlp", policy=policy, weights=weights, learning_rate=0.01,
    inputs=rng.standard_normal((3, 8, 64)).astype(np.float32),
    labels=rng.integers(0, 10, (3, 8)).astype(np.int32),
    poison=np.array([1, np.inf, 1], np.float32),
    eval_inputs=rng.standard_normal((8, 64)).astype(np.float32),
    eval_labels=rng.integers(0, 10, 8).astype(np.int32),
))
assert np.isfinite(result.losses).all(), result.losses
assert result.skipped == [False, True, False], result.skipped
assert result.scales == [65536.0, 65536.0, 32768.0], result.scales
assert any((result.weights[name] != weights[name]).any() for name in weights)
"""

NOTHING_CAME_IN = """
assert not [name for name in sys.modules if name.partition(".")[0] in blocked]
print("done")
"""


def run(code: str, blocked: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    return subprocess.run(
        [sys.executable, "-c", BLOCKER.replace("BLOCKED", repr(blocked)) + textwrap.dedent(code)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
        timeout=240,
    )


def others(backend: str) -> list[str]:
    """Everything that is not the core's nor this backend's own."""
    return [name for other in BACKENDS if other != backend for name in OWN[other]] + LIBRARIES


def need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize("module", [name for names in OWN.values() for name in names])
def test_the_blocker_blocks_what_is_installed(module: str, tmp_path: Path) -> None:
    need(module)
    # It is the blocker that does it: with something else blocked the module is found.
    find = f"import importlib.util\nprint(importlib.util.find_spec({module!r}) is not None)"
    assert run(find, ["something_else"], tmp_path).stdout == "True\n"
    assert run(find, [module], tmp_path).stdout == "False\n"
    for line in (
        f"import {module}",
        f"from {module} import anything",
        f"import importlib; importlib.import_module({module!r})",
    ):
        denied = run(line, [module], tmp_path)
        assert denied.returncode != 0
        assert f"ModuleNotFoundError: No module named {module!r}" in denied.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_trains_with_the_other_frameworks_absent(backend: str, tmp_path: Path) -> None:
    need(*OWN[backend])
    done = run(TRAIN.replace("NAME", repr(backend)) + NOTHING_CAME_IN, others(backend), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_absent_ones_are_errors_that_say_how_to_install_them(backend: str, tmp_path: Path) -> None:
    absent = [name for name in BACKENDS if name != backend]
    code = f"""
    import precision
    assert not [info.name for info in precision.list_backends() if info.name in {absent} and info.installed]
    for name in {absent}:
        try:
            precision.bind("mixed_bfloat16", backend=name)
        except precision.BackendUnavailableError as error:
            assert f"pip install 'precision-policy[{{name}}]'" in str(error), error
        else:
            raise SystemExit(f"{{name}} was bound without its framework")
    """
    done = run(code + NOTHING_CAME_IN.replace("\n", "\n    "), others(backend), tmp_path)
    assert done.returncode == 0, done.stderr
