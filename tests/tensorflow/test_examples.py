"""The examples run, follow ``precision.toml``, and learn."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["keras_fit", "tf_custom_loop"])
def test_an_example_learns_the_digits(name, capsys):
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"(?:loss|->) (\d+\.\d+)", printed)]
    assert losses[-1] < 0.3 * losses[0]
    assert float(re.search(r"accuracy (\d\.\d+)", printed)[1]) > 0.8
    assert "skipped steps 0" in printed
    assert names["mp"].policy.compute_dtype == "bfloat16"
    dtypes = {layer.name.split("_")[0]: layer.compute_dtype for layer in names["model"].layers}
    assert dtypes["batch" if name == "keras_fit" else "norm"] == "float32"
    assert dtypes["conv2d" if name == "keras_fit" else "fc"] == "bfloat16"
    assert names["model"].outputs[0].dtype == "float32"
