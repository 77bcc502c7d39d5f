"""The registry: names and aliases, import at first use only, entry points on a miss, plugins that are broken."""

import importlib
import os
import subprocess
import sys
import textwrap
import threading

import pytest

import precision
from precision import Backend, BackendNotFoundError, BackendUnavailableError, PrecisionError
from precision import registry as reg


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Make an installed-looking distribution with entry points and a module."""

    def make(name, entry_points, module=""):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(module))
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[precision.backends]\n" + entry_points)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    yield make
    for key in [k for k in reg._loaded if k.startswith("plug")]:
        del reg._loaded[key]


GOOD = """
    import precision
    class Mine(precision.Backend):
        name, framework = "plug", "plugmod"
        def bind(self, policy, **options): return ("bound", policy, options)
        def versions(self): return {}
        def capabilities(self): return []
"""


class Minimal(Backend):
    name, framework = "minimal", "numpy"

    def bind(self, policy, **options):
        return (policy, options)

    def versions(self):
        return {}

    def capabilities(self):
        return []


def test_entry_point_is_found_on_a_miss(plugin):
    plugin("plugmod", "plug = plugmod:Mine\n", GOOD)
    listed = {info.name: info for info in precision.list_backends()}["plug"]
    assert (listed.origin, listed.installed, "plugmod" in sys.modules) == ("plugmod", True, False)
    policy = precision.PrecisionPolicy.from_name("bf16")
    assert precision.bind("bf16", backend="Plug", device="x") == ("bound", policy, {"device": "x"})
    assert precision.get_backend("plug") is precision.get_backend(" PLUG ")


def test_broken_plugin_warns_when_listed_and_fails_with_its_own_traceback(plugin):
    plugin("plugbad", "plugbad = plugbad:Mine\n", "def load():\n    raise RuntimeError('plugin broke')\nload()\n")
    precision.list_backends()
    with pytest.raises(RuntimeError, match="plugin broke") as error:
        precision.get_backend("plugbad")
    assert error.traceback[-1].path.name == "plugbad.py"
    with pytest.raises(RuntimeError, match="plugin broke"):  # and again: nothing half-made is kept
        precision.get_backend("plugbad")


def test_plugin_without_its_module_warns_when_listed(plugin):
    plugin("plugodd", "plugodd = no_such_module_here:Mine\n")
    with pytest.warns(UserWarning, match="'plugodd' of plugodd is broken: no module 'no_such_module_here'"):
        listed = precision.list_backends()
    assert not {info.name: info for info in listed}["plugodd"].installed
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        precision.get_backend("plugodd")


def test_plugin_that_names_no_class_or_takes_a_taken_name_is_left_out(plugin):
    plugin("plughide", "jax = plughide:Mine\nplugnone = plughide\n")
    with pytest.warns(UserWarning) as caught:
        names = [info.name for info in precision.list_backends()]
    messages = [str(w.message) for w in caught]
    assert any("'jax' of plughide is hidden" in m for m in messages)
    assert any("'plugnone' of plughide is broken" in m for m in messages)
    assert names.count("jax") == 1 and "plugnone" not in names


def test_register_replace_and_forget():
    precision.register_backend("minimal", Minimal)
    try:
        assert isinstance(precision.get_backend("minimal"), Minimal)
        with pytest.raises(PrecisionError, match="is taken"):
            precision.register_backend("Minimal", Minimal)
        with pytest.raises(PrecisionError, match="is taken"):
            precision.register_backend("keras", Minimal)
        precision.register_backend("minimal", f"{__name__}:Gone", replace=True)
    finally:
        precision.unregister_backend("minimal")
    with pytest.raises(BackendNotFoundError, match="was registered here"):
        precision.unregister_backend("minimal")


@pytest.mark.parametrize("target", ["nocolon", ":Class", "module:", 3, dict])
def test_bad_targets(target):
    with pytest.raises(PrecisionError, match="backend"):
        precision.register_backend("minimal", target)


def test_a_target_that_is_no_backend():
    precision.register_backend("minimal", "builtins:dict")
    try:
        with pytest.raises(PrecisionError, match="not a subclass"):
            precision.get_backend("minimal")
    finally:
        precision.unregister_backend("minimal")


def test_unknown_names():
    with pytest.raises(BackendNotFoundError, match=r"unknown backend 'touch'.*Did you mean 'torch'.*pip install"):
        precision.get_backend("touch")
    for bad in ("", None, 3):
        with pytest.raises(BackendNotFoundError, match="is a string such as 'torch'"):
            precision.get_backend(bad)
    assert isinstance(BackendNotFoundError("x"), LookupError)


def test_get_backend_imports_once_from_many_threads(plugin):
    slow = "import time, plugcount\ntime.sleep(0.2)\nplugcount.imports.append(1)\n" + textwrap.dedent(GOOD)
    plugin("plugslow", "plugslow = plugslow:Mine\n", slow)
    sys.modules["plugcount"] = counter = type(sys)("plugcount")
    counter.imports = []
    got = []
    threads = [threading.Thread(target=lambda: got.append(precision.get_backend("plugslow"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8 and len(set(map(id, got))) == 1 and counter.imports == [1]


def run(code, path=""):
    env = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, check=False
    )


def test_listing_imports_no_backend_and_no_framework():
    done = run("""
        import sys, precision
        precision.list_backends()
        roots = {m.partition(".")[0] for m in sys.modules}
        bad = roots & {"torch", "tensorflow", "keras", "jax", "optax", "flax", "precision_torch", "precision_jax"}
        assert not bad, bad
    """)
    assert done.returncode == 0, done.stderr


FRAMEWORKS = [("torch", "torch"), ("keras", "tensorflow"), ("jax", "jax")]


@pytest.mark.parametrize(("name", "framework"), FRAMEWORKS)
def test_missing_framework_says_how_to_install(name, framework):
    done = run(f"""
        import sys, importlib.abc, precision
        class Blocker(importlib.abc.MetaPathFinder):
            def find_spec(self, fullname, path=None, target=None):
                if fullname == {framework!r}: raise ModuleNotFoundError(fullname)
        sys.meta_path.insert(0, Blocker())
        try: precision.get_backend({name!r})
        except precision.BackendUnavailableError as e: print(e)
    """)
    assert f"needs {framework}" in done.stdout and "pip install 'precision-policy[" in done.stdout, done.stderr


@pytest.mark.parametrize(("name", "framework"), FRAMEWORKS)
def test_broken_framework_says_so_and_keeps_the_cause(tmp_path, name, framework):
    (tmp_path / framework).mkdir()
    (tmp_path / framework / "__init__.py").write_text("raise OSError('libfoo.so: cannot open')")
    done = run(
        f"""
        import precision
        try: precision.get_backend({name!r})
        except precision.BackendUnavailableError as e: print(e, type(e.__cause__).__name__)
        """,
        tmp_path,
    )
    assert "fails to import (OSError: libfoo.so: cannot open)" in done.stdout, done.stderr
    assert done.stdout.strip().endswith("OSError")
    assert issubclass(BackendUnavailableError, ImportError)
