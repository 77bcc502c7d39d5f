"""The PyTorch example runs, learns the digits, and computes in what its ``precision.toml`` says."""

import re
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_runs_and_learns(capsys):
    names = runpy.run_path(str(EXAMPLES / "pytorch.py"))
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 5
    assert losses[-1] < 0.3 * losses[0]
    assert float(re.search(r"accuracy (\d\.\d+)", printed)[1]) > 0.88
    assert "loss scale 131072" in printed and "skipped steps 0" in printed
    assert printed.splitlines()[-1] == "conv: bfloat16, norm: float32, head: bfloat16"
    assert names["mp"].policy.compute_dtype == "bfloat16"
