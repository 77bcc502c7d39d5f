"""Config files: one policy as TOML, JSON or YAML, in and out, with errors that name file, key and line.

A file holds the fields of :class:`~precision.PrecisionPolicy`; ``preset`` may give the values to start from.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from precision._files import SUFFIXES, kind_of, parse, read_text
from precision.errors import ConfigError, PolicyError
from precision.formats import DTYPES
from precision.loss_scale import LossScale
from precision.names import policy_from_name
from precision.ops import FAMILIES
from precision.policy import PrecisionPolicy, Rule

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


def resolve_policy(policy: PrecisionPolicy | str | PathLike[str]) -> PrecisionPolicy:
    """Return a policy given as itself, as a name or spelling, or as the path of a config file.

    A string that ends in ``.toml``, ``.json``, ``.yaml`` or ``.yml`` is a path.

    Raises:
        PolicyError: unknown name. ConfigError: the file cannot be read.
    """
    if isinstance(policy, PrecisionPolicy):
        return policy
    if isinstance(policy, PathLike) or (isinstance(policy, str) and Path(policy).suffix.lower() in SUFFIXES):
        return read_policy(policy)
    return policy_from_name(policy)


def read_policy(path: str | PathLike[str]) -> PrecisionPolicy:
    """Read a policy file.

    Args:
        path: a ``.toml``, ``.json``, ``.yaml`` or ``.yml`` file.

    Raises:
        ConfigError: missing, malformed, or not valid; the message has file, line (where the format tells) and key.
    """
    kind = kind_of(path)
    return policy_from_text(read_text(path), kind, source=str(Path(path)))


def policy_from_text(text: str, kind: str, source: str = "<text>") -> PrecisionPolicy:
    """Read a policy from the text of a file of a kind (``toml``, ``json`` or ``yaml``). Raises ``ConfigError``."""
    data, lines = parse(text, kind, source)
    try:
        return policy_from_dict(data)
    except PolicyError as error:
        raise _located(error, source, lines) from None


def policy_from_dict(data: Mapping[str, Any]) -> PrecisionPolicy:
    """Build a policy from plain values: the fields of the policy, and ``preset`` for the values to start from.

    Raises:
        PolicyError: unknown or contradictory keys, values out of range; ``.problems`` has them by dotted key.
    """
    fields = dict(data)
    base: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    if "preset" in fields:
        try:
            preset = policy_from_name(fields.pop("preset"))
            base = {name: getattr(preset, name) for name in PrecisionPolicy.model_fields}
        except PolicyError as error:
            problems.append(("preset", str(error)))
            fields.pop("preset", None)
    if "loss_scale" in fields:
        fields["loss_scale"] = _build(LossScale, fields["loss_scale"], "loss_scale", problems)
    if "rules" in fields:
        rules = fields["rules"]
        if isinstance(rules, list):
            fields["rules"] = tuple(_build(Rule, rule, f"rules.{i}", problems) for i, rule in enumerate(rules))
        else:
            problems.append(("rules", "must be a list of tables, each with module or family, and dtype"))
    if not problems:
        return PrecisionPolicy(**{**base, **fields})
    try:  # tell what else is wrong, in the fields that could be read
        PrecisionPolicy(
            **{**base, **{name: value for name, value in fields.items() if name not in ("loss_scale", "rules")}}
        )
    except PolicyError as error:
        problems += error.problems
    raise PolicyError("; ".join(f"{key}: {message}" for key, message in problems), problems)


def _build(cls: type[Any], value: Any, key: str, problems: list[tuple[str, str]]) -> Any:
    if not isinstance(value, Mapping):
        problems.append((key, f"must be a table of settings (given: {value!r})"))
        return None
    try:
        return cls(**{str(name): item for name, item in value.items()})
    except PolicyError as error:
        problems += [(f"{key}.{k}" if k else key, m) for k, m in error.problems or [("", str(error))]]
        return None


def write_policy(policy: PrecisionPolicy, path: str | PathLike[str]) -> None:
    """Write a policy file in the format of the path's ending. Reading it gives an equal policy.

    Raises:
        ConfigError: the ending is unknown or the file cannot be written.
    """
    file = Path(path)
    text = policy_to_text(policy, kind_of(file))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}") from None


def policy_to_text(policy: PrecisionPolicy, kind: str) -> str:
    """The text of a policy file of a kind: ``toml``, ``json`` or ``yaml``."""
    data = policy.to_dict()
    if kind == "toml":
        import tomli_w

        return tomli_w.dumps(data)
    if kind == "json":
        return json.dumps(data, indent=2) + "\n"
    return yaml.safe_dump(data, sort_keys=False)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a policy file (draft 2020-12), as published in ``docs/precision.schema.json``.

    It holds what a schema can say: names, types, ranges and one target a rule. Whether settings contradict each other is
    checked on reading.
    """
    schema = PrecisionPolicy.model_json_schema()
    definitions = schema["$defs"]
    for cls, part in ((PrecisionPolicy, schema), (LossScale, definitions["LossScale"]), (Rule, definitions["Rule"])):
        about = _attribute_docs(cls)
        part["description"] = (cls.__doc__ or "").partition("\n")[0]
        for name, field in part["properties"].items():
            field["description"] = about[name]
            field.pop("title", None)
            if name.endswith("dtype"):
                field["examples"] = list(DTYPES)
            field.update(_RANGES.get(name, {}))
    definitions["Rule"]["oneOf"] = [{"required": ["module"]}, {"required": ["family"]}]
    definitions["Rule"]["properties"]["family"]["anyOf"][0]["enum"] = list(FAMILIES)
    preset = {"type": "string", "description": "a preset or another tool's spelling, for the values to start from"}
    schema["properties"] = {"preset": preset, **schema["properties"]}
    return {"$schema": SCHEMA_ID, "$id": "precision.schema.json", **schema}


_RANGES: dict[str, dict[str, float]] = {
    "initial": {"exclusiveMinimum": 0},
    "growth_factor": {"exclusiveMinimum": 1},
    "backoff_factor": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "growth_interval": {"minimum": 1},
    "minimum": {"exclusiveMinimum": 0},
    "maximum": {"exclusiveMinimum": 0},
    "hysteresis": {"minimum": 1},
}


def _attribute_docs(cls: type[Any]) -> dict[str, str]:
    """The sentences of a class docstring's ``Attributes`` section, by attribute."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "") for name, text in entries}


def _located(error: PolicyError, source: str, lines: Mapping[str, int]) -> ConfigError:
    """Turn a policy error into one that names file, line and key for each problem."""
    parts = []
    for key, message in error.problems or (("", str(error)),):
        probe = key
        while probe and probe not in lines:
            probe = probe.rpartition(".")[0]
        where = f"{source}:{lines[probe]}" if probe else source
        parts.append(f"{where}: {key}: {message}" if key else f"{where}: {message}")
    return ConfigError("\n".join(parts), error.problems)
