"""The JAX examples run, learn the digits, and compute in what their ``precision.toml`` says."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["jax_optax", "flax_nnx", "equinox_example"])
def test_runs_and_learns(name, capsys):
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 5
    assert losses[-1] < 0.3 * losses[0]
    assert float(re.search(r"accuracy (\d\.\d+)", printed)[1]) > 0.88
    assert "loss scale 131072" in printed  # 150 steps, growing every 20th: 1024 * 2**7
    assert "skipped steps 0" in printed
    assert names["mp"].policy.compute_dtype == "bfloat16"
    if name != "flax_nnx":
        assert {"fc: bfloat16", "norm: float32", "head: bfloat16"} == set(printed.splitlines()[-1].split(", "))
