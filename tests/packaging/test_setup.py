"""What `make` does to the environment, with an interpreter that only pretends; and that the pins pin everything."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .conftest import ROOT

# Stands in for Python: tells a version, makes a "venv" that holds a copy of itself, and notes what pip was asked.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c "*"sys.exit("*) exit {too_old} ;;
  "-c "*base_prefix*) echo "{version} $0" ;;
  "-c "*sys.version_info*) echo "{version}" ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv {version}" >> "{log}" ;;
  "-m pip") echo "pip $*" >> "{log}" ;;
esac
"""


class Project:
    """A copy of what `make` looks at, and stand-ins for interpreters."""

    def __init__(self, path: Path) -> None:
        self.path, self.log = path / "project", path / "log"
        (self.path / "precision").mkdir(parents=True)
        (self.path / "backends" / "precision_torch").mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "precision/_version.py"):
            shutil.copy(ROOT / name, self.path / name)

    def interpreter(self, name: str, version: str) -> str:
        too_old = int(tuple(map(int, version.split("."))) < (3, 11))
        path = self.path.parent / name
        path.write_text(FAKE_PYTHON.format(version=version, too_old=too_old, log=self.log))
        path.chmod(0o755)
        return str(path)

    def make(self, *arguments: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        command = ["make", "-C", str(self.path), "--no-print-directory", "install", *arguments]
        done = subprocess.run(command, text=True, capture_output=True, env=clean | env, timeout=60)
        assert not check or done.returncode == 0, done.stderr
        return done

    def noted(self) -> list[str]:
        """What was done since the last time this was asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.split()[0] for line in lines]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return Project(tmp_path)


def test_installs_once_and_again_only_when_something_changed(project: Project) -> None:
    python = f"PYTHON={project.interpreter('python-a', '3.12.1')}"
    project.make(python)
    assert project.noted() == ["venv", "pip", "pip", "pip"]
    # Again, with the interpreter named or not, and with new times on the files: nothing.
    os.utime(project.path / "pyproject.toml")
    assert project.make(python).stdout == project.make().stdout == ""
    assert project.noted() == []
    # Other pins: installed into the same environment.
    with (project.path / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    project.make()
    assert project.noted() == ["pip", "pip", "pip"]
    # Another interpreter: a new environment. Without one named, that one stays.
    project.make(f"PYTHON={project.interpreter('python-b', '3.13.0')}")
    assert project.noted() == ["venv", "pip", "pip", "pip"]
    project.make()
    assert project.noted() == []
    assert sorted(path.name for path in project.path.iterdir()) == [
        ".venv", "Makefile", "backends", "constraints.txt", "precision", "pyproject.toml",
    ]  # fmt: skip


def test_an_install_that_broke_off_is_begun_again(project: Project) -> None:
    python = project.interpreter("python-a", "3.12.1")
    broken = Path(python).read_text().replace('"-m pip")', '"-m pip") exit 3; ')
    Path(python).write_text(broken)
    assert project.make(f"PYTHON={python}", check=False).returncode != 0
    project.noted()
    shutil.copy(project.interpreter("python-c", "3.12.1"), project.path / ".venv/bin/python")
    project.make()
    assert project.noted() == ["pip", "pip", "pip"]


def test_an_old_interpreter_is_refused_and_a_new_one_named(project: Project) -> None:
    old = project.interpreter("old", "3.9.2")
    bin = project.path.parent / "bin"
    bin.mkdir()
    for name in ("python3.13", "python3.12", "python3.11"):  # on the PATH only one that works
        version = "3.12.1" if name == "python3.12" else "3.8.0"
        shutil.copy(project.interpreter(name, version), bin / name)
    done = project.make(f"PYTHON={old}", check=False, PATH=f"{bin}:{os.environ['PATH']}")
    assert done.returncode != 0
    assert f"{old} is Python 3.9.2; precision needs Python 3.11 or newer." in done.stderr
    assert "make PYTHON=python3.12 install" in done.stderr
    assert not (project.path / ".venv").exists()


def test_a_missing_interpreter_is_refused(project: Project) -> None:
    done = project.make("PYTHON=no-such-python", check=False)
    assert done.returncode != 0
    assert "no-such-python is not a Python that runs" in done.stderr
    assert not (project.path / ".venv").exists()


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = [Requirement(line) for line in [*project["dependencies"], *(r for e in extras.values() for r in e)]]
    return [requirement for requirement in found if requirement.name != project["name"]]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    matches = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line) for line in lines if line[:1] not in ("", "#")]
    assert all(matches), "every line is name==version, with no local part and no place to find it"
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_the_build_uses_the_pinned_setuptools() -> None:
    (needed,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert Requirement(needed).specifier.contains(pins()["setuptools"])
