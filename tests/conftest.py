"""What must be settled before any framework is imported (device, chatter, threads), and hypothesis's profiles."""

import os

# Set here as well as in the Makefile, so that a plain `pytest` run is the same run.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", str(min(os.cpu_count() or 1, 4)))

import contextlib

from hypothesis import HealthCheck, settings

# PyTorch loads triton late, and triton's native library crashes the process if TensorFlow's came first.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

# No deadline: a first call that compiles is not a slow test. In CI every run draws the same examples.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
