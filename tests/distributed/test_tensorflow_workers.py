"""Several workers, each a process: an overflow on one alone; restarts of a killed run; the example of two workers."""

import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from precision.testing import RankError, free_port, run_ranks
from tests.distributed import workers_tensorflow as workers

pytestmark = pytest.mark.timeout(600)  # one launch does all of it: a minute on an idle machine

ENV = {
    "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def ports():
    return [free_port(), free_port()]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """What each of two workers found, and how each ended, from one launch."""
    folder = tmp_path_factory.mktemp("workers")
    ends = run_ranks(workers.multi_worker, 2, (ports(), str(folder)), env=ENV, timeout=560, check=False)
    found = [folder / f"found-{rank}" for rank in range(2)]
    assert all(path.exists() for path in found), ends
    return [pickle.loads(path.read_bytes()) for path in found], ends


@pytest.fixture
def both(launch):
    return launch[0]


def test_what_one_worker_overflows_both_skip_in_fit(both):
    one, other = both
    assert one["unchanged"] and other["unchanged"]
    assert one["state"] == other["state"]
    assert (one["state"]["skipped"], one["state"]["consecutive_skips"], one["state"]["scale"]) == (1, 1, 2048.0)
    assert all(np.array_equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(one["statistics"], other["statistics"], strict=True))
    assert one["loss"] == other["loss"] and one["evaluate"] == other["evaluate"]


def test_custom_loops_follow_the_plan_on_both_through_a_delay(both):
    for found in both:
        assert found["as the plan says"]
        (weights,), (statistic,) = found["loop"]
        assert weights.tolist() == [-4.0, -4.0] and statistic == 4.0


def test_both_end_with_the_same_tensors(both):
    one, other = (found["diverged"] for found in both)
    assert one == other
    tensors, in_a_row, _ = one
    assert in_a_row == 3 and {tensor.rank for tensor in tensors} == {1}
    assert tensors[0].name.endswith("kernel") and len(tensors) == 6


def test_checkpoints_are_of_both_or_of_none(both):
    for found in both:
        assert found["steps"] == [3] and found["restored"] == (3, {"at": 3})
        assert found["goes on equal"]
    assert "another process failed" in both[0]["one failed"]
    assert "must be JSON values" in both[1]["one failed"]


def test_an_overflow_on_one_worker_leaves_keras_waiting_for_ever(launch):
    """The first worker waits for a sum that the other left out. Ours took its steps above, in the same processes."""
    _, ends = launch
    assert all(isinstance(end, RankError) for end in ends)
    assert ends[0].codes == (-signal.SIGALRM,)
    assert "one step is taken" in str(ends[0]) and "three steps are taken" not in str(ends[0])


def test_a_run_killed_between_and_during_saves_ends_as_one_never_killed(tmp_path):
    rng = np.random.default_rng(11)
    kills = [(kind, int(rng.integers(1, 4)), float(rng.uniform(0, 0.12))) for kind in ("between", "during") * 3]
    ((equal, killed, at, left, code),) = run_ranks(workers.restarts, 1, (str(tmp_path), kills), env=ENV, timeout=300)
    assert code == 0 and equal
    assert killed >= 4  # a kill may come after a short run has ended
    assert any(position is not None for position in at)
    assert len([name for name in left if name.startswith("step-")]) == 2  # keep = 2


def test_the_example_runs_as_two_workers():
    example = Path(__file__).parents[2] / "examples" / "tensorflow_workers.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("worker ")]
    assert len(lines) == 2
    assert len({line.split(": ", 1)[1] for line in lines}) == 1
    assert "1 skipped" in lines[0]
