"""Any tool's config to any other's, and what differs in effect between two of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from precision._files import SUFFIXES, kind_of, parse, read_text
from precision.config import policy_from_dict, policy_from_text, resolve_policy
from precision.errors import ConfigError, InteropError, PolicyError
from precision.interop.base import Export, Import, differing_fields, plain_field
from precision.interop.targets import get_target, list_targets
from precision.policy import PrecisionPolicy

OWN = "precision"

Source = PrecisionPolicy | str | PathLike[str] | Mapping[str, Any]


def read(source: Source, tool: str | None = None) -> Import:
    """Read a precision config of any tool.

    Args:
        source: a policy, a spelling (``"16-mixed"``), the path of a ``.toml``, ``.json`` or ``.yaml`` file, or its plain values.
        tool: whose config it is; left out, it is recognised by its fields.

    Returns:
        The policy it amounts to, what it holds besides, and notes.

    Raises:
        InteropError: no tool's config, several tools', or not a valid one.
        ConfigError: the file cannot be read, is malformed, too large or nested too deeply.
        PolicyError: what it says is no valid policy.

    Example:
        >>> read({"bf16": {"enabled": True}}).source
        'deepspeed'
    """
    if isinstance(source, PrecisionPolicy):
        return Import(OWN, source)
    if isinstance(source, PathLike) or (isinstance(source, str) and Path(source).suffix.lower() in SUFFIXES):
        return _read_file(Path(source), tool)
    if isinstance(source, Mapping):
        return _read_values(dict(source), tool, "these values")
    if tool is not None and tool != OWN:
        return get_target(tool).read(source)
    return Import(OWN, resolve_policy(source))


def convert(
    source: Source, to: str, *, tool: str | None = None, base: Any = None, strict: bool = False, **options: Any
) -> Export:
    """Write the config of a tool from any other's.

    Args:
        source: as for :func:`read`.
        to: the target's name, or ``"precision"``.
        tool: whose config ``source`` is; left out, it is recognised.
        base: a config of the target to lay the result over, which keeps what is not about precision. If source and target
            are the same tool, what the source holds besides is kept in any case.
        strict: whether something that the target cannot express is an error.
        options: the target's own (``zero_stage=`` for DeepSpeed).

    Returns:
        The config, what was lost, and notes, those on the source included.

    Raises:
        InteropError, ConfigError, PolicyError: as :func:`read`; ``strict`` and something is lost; or an unknown target.

    Example:
        >>> export = convert("mixed_float16", "huggingface")
        >>> [lost.field for lost in export.lost]
        []
    """
    found = read(source, tool)
    if to.strip().lower() == OWN:
        export = Export(OWN, found.policy.to_dict())
    else:
        target = get_target(to)
        if base is None and target.name == found.source:
            base = found.rest
        try:
            export = target.export(found.policy, base=base, strict=strict, **options)
        except TypeError as error:
            if options and "unexpected keyword argument" in str(error):
                raise InteropError(f"{target.name} has no option {', '.join(options)}.") from None
            raise
    notes = list(found.notes)
    if found.rest and found.source != export.target:
        notes.append(f"left behind, as it is not about precision: {', '.join(map(str, found.rest))}")
    return dataclasses.replace(export, notes=(*notes, *export.notes))


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field in which two configs differ in effect.

    Attributes:
        field: dotted name in the policy.
        first, second: what each says, as plain values; None where it does not say.
    """

    field: str
    first: Any
    second: Any


def diff(
    first: Source, second: Source, *, first_tool: str | None = None, second_tool: str | None = None
) -> list[Difference]:
    """What differs in effect between two configs of any tools; empty if nothing does.

    Args:
        first, second: as for :func:`read`.
        first_tool, second_tool: whose configs they are; left out, they are recognised.

    Raises:
        InteropError, ConfigError, PolicyError: as :func:`read`.

    Example:
        >>> diff("16-mixed", {"fp16": True})
        []
    """
    return differences(read(first, first_tool).policy, read(second, second_tool).policy)


def differences(a: PrecisionPolicy, b: PrecisionPolicy) -> list[Difference]:
    """What differs in effect between two policies, field by field."""
    return [Difference(field, _value(a, field), _value(b, field)) for field in differing_fields(a, b)]


def to_text(export: Export, kind: str | None = None) -> str:
    """The text of an export as a file of a kind (``json``, ``yaml``, ``toml``, ``text``); left out, the tool's usual one.

    Raises:
        InteropError: the kind cannot hold it.
    """
    kinds = ("toml", "json", "yaml") if export.target == OWN else get_target(export.target).kinds
    kind = kinds[0] if kind is None else kind
    if kind == "text" or isinstance(export.config, str):
        if not isinstance(export.config, str):
            raise InteropError(f"the config of {export.target} is a table; write it as {' or '.join(kinds)}.")
        return export.config + "\n"
    if kind == "json":
        return json.dumps(export.config, indent=2) + "\n"
    if kind == "yaml":
        import yaml

        return yaml.safe_dump(export.config, sort_keys=False)
    if kind == "toml":
        import tomli_w

        try:
            return tomli_w.dumps(export.config)
        except TypeError as error:
            raise InteropError(f"TOML cannot hold this config ({error}); write it as {' or '.join(kinds)}.") from None
    raise InteropError(f"unknown kind of file {kind!r}; use json, yaml, toml or text.")


def write_text(export: Export, path: str | PathLike[str]) -> None:
    """Write an export to a file, of the kind that its ending says: ``.json``, ``.yaml``, ``.yml``, ``.toml``, or another for text.

    Raises:
        InteropError: the kind cannot hold the config (a config that is a string takes any ending but these).
        ConfigError: the ending is unknown, or the file cannot be written.
    """
    file = Path(path)
    if isinstance(export.config, str) and file.suffix.lower() in SUFFIXES:
        raise InteropError(
            f"{file}: the config of {export.target} is a line of text; give the file another ending, such as .txt."
        )
    text = to_text(export, "text" if isinstance(export.config, str) else kind_of(file))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}") from None


def read_values(path: str | PathLike[str]) -> dict[str, Any]:
    """The plain values of a file, to give as ``base``. Raises ``ConfigError``."""
    file = Path(path)
    return parse(read_text(file), kind_of(file), str(file)).values


def _read_file(path: Path, tool: str | None) -> Import:
    text, kind = read_text(path), kind_of(path)
    values = parse(text, kind, str(path)).values
    if tool == OWN or (tool is None and _is_own(values)):
        return Import(OWN, policy_from_text(text, kind, str(path)))
    try:
        return _read_values(values, tool, str(path))
    except InteropError as error:
        raise InteropError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None
    except PolicyError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: {error}", error.problems) from None


def _read_values(values: dict[str, Any], tool: str | None, source: str) -> Import:
    if tool is not None and tool != OWN:
        return get_target(tool).read(values)
    if tool == OWN or _is_own(values):
        return Import(OWN, policy_from_dict(values))
    found = [target for target in list_targets() if target.recognises(values)]
    if len(found) == 1:
        return found[0].read(values)
    names = ", ".join(target.name for target in found or list_targets())
    if found:
        raise InteropError(f"{source} could be the config of several tools ({names}): say which (tool=, or --from).")
    keys = ", ".join(map(str, list(values)[:8])) or "nothing"
    raise InteropError(
        f"{source}: no precision config that is known here; it holds {keys}. Say whose it is (tool=, or --from): {names}."
    )


def _is_own(values: Mapping[str, Any]) -> bool:
    """Whether it looks like a file of ours: only our keys, and one that no other tool has."""
    ours = {"preset", *PrecisionPolicy.model_fields}
    telling = {"preset", "rules", "loss_scale", "compute_dtype", "output_dtype", "reduce_dtype", "emulate"}
    return bool(telling & set(values)) and len(ours & set(values)) * 2 > len(values)


def _value(policy: PrecisionPolicy, field: str) -> Any:
    section, _, key = field.partition(".")
    return policy.loss_scale.effective().get(key) if section == "loss_scale" and key else plain_field(policy, field)
