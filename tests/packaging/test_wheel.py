"""What the wheel holds, and that it works where no framework is installed."""

import json
import statistics
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import precision

from .conftest import ROOT, Environment

PACKAGES = ("precision", "precision_torch", "precision_tensorflow", "precision_jax")
FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "jaxlib", "optax", "flax", "equinox", "haiku", "orbax", "jmp")

# `import precision` may take this many times as long as importing what it imports from others does.
IMPORT_RATIO = 1.25


def sources() -> set[str]:
    """Every file of the packages in this checkout that has to be installed, by its path in site-packages."""
    wanted = (".py", ".toml", ".json", ".txt")
    found = set()
    for package in PACKAGES:
        root = ROOT if package == "precision" else ROOT / "backends"
        for path in (root / package).rglob("*"):
            if "__pycache__" not in path.parts and (path.suffix in wanted or path.name == "py.typed"):
                found.add(path.relative_to(root).as_posix())
    return found


def test_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    info = {name for name in names if ".dist-info/" in name}
    assert names - info == sources()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_marked_as_typed(wheel: Path, package: str) -> None:
    assert f"{package}/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(path).decode())
    assert metadata["Name"] == "precision-policy"
    assert metadata["Version"] == precision.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"torch", "tensorflow", "jax", "all", "docs", "dev"} <= set(metadata.get_all("Provides-Extra"))
    unconditional = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in unconditional if line.lower().startswith(FRAMEWORKS)]


def test_core_environment_holds_no_framework(core_env: Environment) -> None:
    # The premise of the tests below.
    code = "import importlib.util as u, json; print(json.dumps([n for n in {} if u.find_spec(n)]))"
    assert json.loads(core_env.python(code.format(FRAMEWORKS))) == []


def test_imports_without_any_framework(core_env: Environment) -> None:
    code = f"""
import json, sys
import precision
from importlib.metadata import version
policy = precision.PrecisionPolicy.from_name("mixed_float16")
print(json.dumps(dict(
    file=precision.__file__, version=precision.__version__, installed=version("precision-policy"),
    compute=policy.compute_dtype, loaded=[n for n in {FRAMEWORKS} if n in sys.modules],
)))"""
    told = json.loads(core_env.python(code))
    assert Path(told["file"]).is_relative_to(core_env.path)
    assert told["version"] == told["installed"] == precision.__version__
    assert told["compute"] == "float16"
    assert told["loaded"] == []


def test_every_module_of_the_core_imports_without_any_framework(core_env: Environment) -> None:
    code = """
import importlib, json, pkgutil
import precision
names = [m.name for m in pkgutil.walk_packages(precision.__path__, "precision.") if "__main__" not in m.name]
for_pytest = {f"precision.testing.conformance.{name}" for name in ("conftest", "test_conformance")}
assert for_pytest <= set(names)
names = [name for name in names if name not in for_pytest]
print(json.dumps([importlib.import_module(name).__name__ for name in names]))"""
    assert {"precision.policy", "precision.loss_scale"} <= set(json.loads(core_env.python(code)))


def test_backends_are_listed_and_say_how_to_install_their_framework(core_env: Environment) -> None:
    code = """
import json
import precision
told = {}
for info in precision.list_backends():
    assert not info.installed, info
    try:
        precision.get_backend(info.name)
    except precision.BackendUnavailableError as error:
        told[info.name] = str(error)
print(json.dumps(told))"""
    told = json.loads(core_env.python(code))
    assert set(told) == {"torch", "tensorflow", "jax"}
    for name, message in told.items():
        assert f"pip install 'precision-policy[{name}]'" in message


@pytest.mark.parametrize("arguments", [["--help"], ["backends"], ["show", "mixed_float16"], ["schema"]])
def test_command_line_works_without_any_framework(core_env: Environment, arguments: list[str]) -> None:
    assert core_env.run(str(core_env.bin / "precision"), *arguments).stdout.strip()


def test_import_takes_no_longer_than_its_dependencies_do(core_env: Environment) -> None:
    # Processor time in fresh processes, the two turn and turn about, and the least of each: what else the machine does
    # can only add to it.
    listing = """
import json, sys
before = set(sys.modules)
import precision
def ours(name): return name.split(".")[0] == "precision"
def theirs(module):
    file = getattr(module, "__file__", None) or ""
    return "site-packages" in file
new = [name for name, module in list(sys.modules.items()) if name not in before]
print(json.dumps([name for name in new if not ours(name) and theirs(sys.modules[name])]))"""
    theirs = json.loads(core_env.python(listing))
    roots = sorted({name.split(".")[0] for name in theirs})
    assert "numpy" in roots

    clock = "import importlib, sys, time\nt = time.process_time()\n{}\nprint(time.process_time() - t)"
    own = clock.format("import precision")
    others = clock.format(f"for name in {theirs}:\n    importlib.import_module(name)")
    own_s, others_s = [], []
    for _ in range(15):
        own_s.append(float(core_env.python(own)))
        others_s.append(float(core_env.python(others)))
    ratio, medians = min(own_s) / min(others_s), statistics.median(own_s) / statistics.median(others_s)
    print(
        f"\nimport precision: {1000 * min(own_s):.0f} ms; {', '.join(roots)} alone: {1000 * min(others_s):.0f} ms; "
        f"ratio {ratio:.3f} (bar {IMPORT_RATIO}); of medians {medians:.3f}"
    )
    assert ratio <= IMPORT_RATIO
