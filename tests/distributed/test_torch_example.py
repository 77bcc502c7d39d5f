"""The example for two processes, started by torchrun on the loopback address, and started again."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_ddp.py"


def run(folder, steps):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [*launcher, *where, str(EXAMPLE), "--steps", str(steps), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_processes_skip_together_and_go_on_where_they_stopped(tmp_path):
    first = run(tmp_path, 10)
    for rank in (0, 1):
        assert f"rank {rank}: step 7 skipped, scale now 512" in first  # only the last rank's loss was infinite
        assert f"rank {rank}: from step 0 to 10" in first
    second = run(tmp_path, 14)
    for rank in (0, 1):
        assert f"rank {rank}: step 12 skipped, scale now 256" in second  # only the first rank's was NaN
        assert f"rank {rank}: from step 10 to 14" in second
    states = set(re.findall(r"\{'version'.*?\}", second))
    assert len(states) == 1 and "'skipped': 2" in states.pop()
