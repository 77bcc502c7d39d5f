"""Names to backends. The only module that imports one, and only when it is asked for.

Built-in names stand in a table of strings; entry points (group ``precision.backends``) are read only on a miss.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import threading
import warnings
from os import PathLike
from typing import Any

from precision.backend import Backend, BoundPolicy
from precision.config import resolve_policy
from precision.errors import BackendNotFoundError, BackendUnavailableError, PrecisionError, nearest
from precision.policy import PrecisionPolicy

GROUP = "precision.backends"

_BUILTIN = {
    "torch": "precision_torch:TorchBackend",
    "tensorflow": "precision_tensorflow:TensorFlowBackend",
    "jax": "precision_jax:JaxBackend",
}
_ALIASES = {"pytorch": "torch", "tf": "tensorflow", "keras": "tensorflow"}
_NEEDS = {"torch": ("torch",), "tensorflow": ("tensorflow", "keras"), "jax": ("jax", "optax")}

_registered: dict[str, str | type[Backend]] = {}
_loaded: dict[str, Backend] = {}
_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class BackendInfo:
    """A known backend, found without importing it.

    Attributes:
        name: registered name.
        target: ``"module:Class"``.
        origin: ``"built-in"``, ``"registered"`` or the distribution that supplies the entry point.
        aliases: other names for it.
        installed: whether its modules can be found (not whether they work).
        missing: the top-level modules that cannot be found.
    """

    name: str
    target: str
    origin: str
    aliases: tuple[str, ...]
    installed: bool
    missing: tuple[str, ...]


def register_backend(name: str, target: str | type[Backend], *, replace: bool = False) -> None:
    """Register a backend under a name.

    Args:
        name: the name to ask for it by.
        target: ``"package.module:Class"`` (imported at first use) or the class.
        replace: whether a name already taken may be taken over.

    Raises:
        PrecisionError: the name is taken, or the target is not of that form.

    Example:
        >>> register_backend("mine", "package.module:Class")
        >>> unregister_backend("mine")
    """
    key = _key(name)
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        if not module or not attribute:
            raise PrecisionError(f"backend target {target!r} must read 'package.module:Class'.")
    elif not (isinstance(target, type) and issubclass(target, Backend)):
        raise PrecisionError(
            f"a backend is a subclass of precision.Backend or a 'module:Class' string, not {target!r}."
        )
    with _lock:
        if not replace and (key in _BUILTIN or key in _ALIASES or key in _registered):
            raise PrecisionError(f"backend name {key!r} is taken; pass replace=True to take it over.")
        _registered[key] = target
        _loaded.pop(key, None)


def unregister_backend(name: str) -> None:
    """Forget a backend registered with :func:`register_backend`. Unknown names are an error."""
    key = _key(name)
    with _lock:
        if key not in _registered:
            raise BackendNotFoundError(f"no backend {key!r} was registered here.")
        del _registered[key]
        _loaded.pop(key, None)


def get_backend(name: str) -> Backend:
    """Return a backend by name or alias; import it at the first call only. Safe to call from several threads.

    Raises:
        BackendNotFoundError: no such name; gives the nearest and how to install.
        BackendUnavailableError: its framework is missing or fails to import; gives the command that installs it.
        Exception: whatever a third party's backend raises when imported, with its own traceback.
    """
    key = _key(name)
    with _lock:
        if key in _registered:
            pass
        else:
            key = _ALIASES.get(key, key)
        if key not in _loaded:
            _loaded[key] = _load(key)
        return _loaded[key]


def list_backends() -> list[BackendInfo]:
    """List the known backends: built-in, registered and from entry points. Imports none of them.

    An entry point that is malformed or clashes with another name is left out with a warning.
    """
    with _lock:
        registered = dict(_registered)
    infos = [_info(name, target, "built-in") for name, target in _BUILTIN.items() if name not in registered]
    for name, target in registered.items():
        text = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        infos.append(_info(name, text, "registered"))
    taken = {info.name for info in infos} | set(_ALIASES)
    for entry in _entry_points():
        key = entry.name.strip().lower()
        origin = entry.dist.name if entry.dist is not None else "entry point"
        if key in taken:
            warnings.warn(f"backend {entry.name!r} of {origin} is hidden by another of that name.", stacklevel=2)
        elif not entry.attr:
            warnings.warn(
                f"backend {entry.name!r} of {origin} is broken: {entry.value!r} is no module:Class.", stacklevel=2
            )
        else:
            info = _info(key, entry.value, origin)
            if not info.installed:
                warnings.warn(f"backend {key!r} of {origin} is broken: no module {info.missing[0]!r}.", stacklevel=2)
            infos.append(info)
            taken.add(key)
    return infos


def bind(policy: PrecisionPolicy | str | PathLike[str], backend: str | Backend, **options: Any) -> BoundPolicy:
    """Tie a policy to a backend.

    Args:
        policy: a policy, the name of a preset or any accepted spelling, or the path of a config file.
        backend: a backend's name or alias (``"torch"``, ``"tf"``, ``"keras"``, ``"jax"``), or a backend.
        options: passed to the backend (``device=`` in PyTorch).

    Returns:
        The bound policy; its members give the framework's own objects.

    Raises:
        PolicyError, ConfigError: the policy is not valid.
        BackendNotFoundError, BackendUnavailableError: the backend is unknown, or its framework is not there.
        UnsupportedError: the device cannot do what the policy asks.

    Example:
        >>> mp = bind("mixed_bfloat16", backend="torch")    # doctest: +SKIP
    """
    found = backend if isinstance(backend, Backend) else get_backend(backend)
    return found.bind(resolve_policy(policy), **options)


def _key(name: str) -> str:
    if not isinstance(name, str) or not name.strip():
        raise BackendNotFoundError(f"a backend name is a string such as 'torch', not {name!r}.")
    return name.strip().lower()


def _load(key: str) -> Backend:
    target: str | type[Backend] | None = _registered.get(key) or _BUILTIN.get(key)
    if target is None:
        entry = next((e for e in _entry_points() if e.name.strip().lower() == key), None)
        if entry is None:
            raise _not_found(key)
        target = entry.value
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        if key in _BUILTIN and key not in _registered:
            loaded = _import_builtin(key, module)
        else:
            loaded = importlib.import_module(module)
        cls: Any = loaded
        for part in attribute.split("."):
            cls = getattr(cls, part)
    else:
        cls = target
    backend = cls()
    if not isinstance(backend, Backend):
        raise PrecisionError(f"backend {key!r}: {target!r} is not a subclass of precision.Backend.")
    return backend


def _import_builtin(key: str, module: str) -> Any:
    """Import one of our own backends; a missing or broken framework becomes an error that says how to install it."""
    missing = [need for need in _NEEDS[key] if not _findable(need)]
    how = f"pip install 'precision-policy[{key}]'"
    if missing:
        raise BackendUnavailableError(
            f"backend {key!r} needs {' and '.join(missing)}, which is not installed. Install with: {how}"
        )
    try:
        return importlib.import_module(module)
    except PrecisionError:
        raise
    except Exception as error:
        raise BackendUnavailableError(
            f"backend {key!r}: its framework is installed but fails to import ({type(error).__name__}: {error}). "
            f"Reinstall with: {how}"
        ) from error


def _not_found(key: str) -> BackendNotFoundError:
    known = [*_BUILTIN, *_ALIASES, *_registered, *(entry.name for entry in _entry_points())]
    return BackendNotFoundError(
        f"unknown backend {key!r}.{nearest(key, known)} Known: {', '.join(dict.fromkeys(known))}. Built-in ones install "
        "with pip install 'precision-policy[torch]' (or [tensorflow], [jax]); others through register_backend or the "
        f"entry-point group {GROUP!r}."
    )


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name)


def _info(name: str, target: str, origin: str) -> BackendInfo:
    needs = (target.partition(":")[0].partition(".")[0], *(_NEEDS.get(name, ()) if origin == "built-in" else ()))
    missing = tuple(need for need in needs if not _findable(need))
    aliases = tuple(alias for alias, of in _ALIASES.items() if of == name)
    return BackendInfo(name, target, origin, aliases, not missing, missing)


def _findable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
