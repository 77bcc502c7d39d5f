"""The two-process example of the docs runs, learns, and both processes end with the same numbers."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_processes.py"


def test_two_processes_train_as_one(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # less time spent compiling
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(
        r"process (\d): (from step 0, loss (\d\.\d+), (\d) skipped, .*?, checkpoints \[20, 40\])", done.stdout
    )
    assert sorted(line[0] for line in lines) == ["0", "1"], done.stdout
    assert lines[0][1:] == lines[1][1:], "weights, scale and loss are the same to the last digit printed"
    assert float(lines[0][2]) < 1.2 and lines[0][3] == "1"
    assert "loss scale 512," in lines[0][1]
