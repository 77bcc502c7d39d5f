"""The conformance kit as a third party runs it: pytest on the package, in a process and a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path


def run_kit(folder, backend=None, timeout=280):
    """Run it in ``folder``, with ``PRECISION_BACKEND`` set to ``backend`` (unset for None); the completed process."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--pyargs",
        "precision.testing.conformance",
    ]
    env = {name: value for name, value in os.environ.items() if name != "PRECISION_BACKEND"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    if backend is not None:
        env["PRECISION_BACKEND"] = backend
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)
