"""The arrows of the design, read off the source: backends import the core, the core no backend and no framework."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ROOT

# What belongs to one framework, by import name.
OWNED = {
    "torch": {"torch", "torchvision", "torchaudio", "torchao", "lightning", "pytorch_lightning", "lightning_fabric",
              "accelerate", "apex", "deepspeed", "transformers"},
    "tensorflow": {"tensorflow", "keras", "tf_keras"},
    "jax": {"jax", "jaxlib", "optax", "flax", "equinox", "haiku", "orbax", "chex", "jmp", "mpx"},
}  # fmt: skip
BACKENDS = {name: f"precision_{name}" for name in OWNED}
IMPORT_BY_NAME = "import by name"


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, top-level name) of every import, wherever it stands; an import by name of what is not a literal
    yields IMPORT_BY_NAME as well."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, (node.module or "").split(".")[0]
            if node.module == "importlib" and any(alias.name == "import_module" for alias in node.names):
                yield node.lineno, IMPORT_BY_NAME
        elif isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in ("import_module", "__import__", "load_module", "exec_module"):
                yield node.lineno, IMPORT_BY_NAME
                for argument in node.args[:1]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield node.lineno, argument.value.split(".")[0]


def breaches(folder: Path, forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        for line, name in imported(path.read_text(encoding="utf-8"))
        if name in forbidden
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch.nn import functional",
        "def f():\n    import torch",
        "if TYPE_CHECKING:\n    from torch import Tensor",
        "import importlib\nimportlib.import_module('torch.nn')",
        "__import__('torch')",
    ],
)
def test_the_check_sees_every_way_of_importing(source: str) -> None:
    assert "torch" in [name for _, name in imported(source)]


@pytest.mark.parametrize(
    "source", ["importlib.import_module(name)", "from importlib import import_module as load", "__import__(name)"]
)
def test_the_check_sees_imports_by_name(source: str) -> None:
    assert IMPORT_BY_NAME in [name for _, name in imported(source)]


def test_the_core_imports_no_framework_and_no_backend() -> None:
    assert list((ROOT / "precision").rglob("*.py"))
    assert breaches(ROOT / "precision", {*BACKENDS.values(), *set().union(*OWNED.values())}) == []


BY_NAME = {
    "precision/registry.py": "backends, from its table and entry points",
    "precision/interop/targets.py": "files of precision.interop, from its table",
}


def test_only_these_import_by_name() -> None:
    found = breaches(ROOT / "precision", {IMPORT_BY_NAME})
    assert {line.split(":")[0] for line in found} == set(BY_NAME)


def test_the_targets_are_files_of_the_core() -> None:
    from precision.interop import targets

    assert {path.rpartition(".")[0] for path in targets._TARGETS.values()} == {"precision.interop"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_imports_another_or_its_framework(backend: str) -> None:
    folder = ROOT / "backends" / BACKENDS[backend]
    assert list(folder.rglob("*.py"))
    others = set(OWNED) - {backend}
    assert breaches(folder, {BACKENDS[o] for o in others} | set().union(*(OWNED[o] for o in others))) == []


# What a backend's own package must not import by itself: only whoever imports the module with the drop-in object asks for it.
OTHERS_PACKAGES = {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed", "transformers"}


def test_importing_the_backend_imports_no_drop_in_objects() -> None:
    folder = ROOT / "backends" / "precision_torch"
    asking = {line.split(":")[0].rpartition("/")[2].removesuffix(".py") for line in breaches(folder, OTHERS_PACKAGES)}
    assert "lightning_plugin" in asking
    for path in sorted(folder.glob("*.py")):
        if path.stem not in asking:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
            assert not {f"precision_torch.{name}" for name in asking} & modules, path.name
