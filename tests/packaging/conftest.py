"""The wheel, built once, and an environment that holds it and the core's dependencies: no framework, no pip."""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment, run isolated (-I): nothing of this checkout or of the caller's settings leaks in."""

    path: Path

    @property
    def bin(self) -> Path:
        return self.path / ("Scripts" if os.name == "nt" else "bin")

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        env |= {"OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1"}
        done = subprocess.run(command, cwd=self.path, env=env, text=True, capture_output=True, timeout=120)
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def python(self, code: str) -> str:
        return self.run(str(self.bin / "python"), "-I", "-c", code).stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that no older build lies in the way and none is left behind.

    Beside the packages stand folders that would be packages if the search for them were careless.
    """
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("precision", "backends"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "docs", "examples", "benchmarks"):
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    (source / "backends" / "other").mkdir()
    (source / "backends" / "other" / "__init__.py").touch()
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def core_env(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A new environment with the wheel and what it requires, at the pinned versions."""
    environment = Environment(tmp_path_factory.mktemp("env") / "core")
    venv.create(environment.path, with_pip=False, symlinks=os.name != "nt")
    install = [sys.executable, "-m", "pip", "--python", str(environment.bin / "python"), "install", "--quiet"]
    done = subprocess.run(
        [*install, "-c", str(ROOT / "constraints.txt"), str(wheel)], text=True, capture_output=True, timeout=240
    )
    unreachable = ("connection", "name resolution", "timed out")
    if done.returncode and any(sign in done.stderr.lower() for sign in unreachable) and not os.environ.get("CI"):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return environment
