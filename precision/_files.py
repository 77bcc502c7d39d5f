"""Config files as data: TOML, JSON or YAML to plain values with the line of each key. No code is ever run, sizes are bounded.

What comes out is what JSON has: mappings with string keys, lists, strings, numbers, booleans and None.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from precision.errors import ConfigError

SUFFIXES = {".toml": "toml", ".json": "json", ".yaml": "yaml", ".yml": "yaml"}
MAX_BYTES = 1_000_000
MAX_DEPTH = 50
MAX_VALUES = 50_000

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Parsed(NamedTuple):
    """A file's content: ``values``, and the 1-based line of each dotted key in ``lines``."""

    values: dict[str, Any]
    lines: dict[str, int]


def kind_of(path: str | PathLike[str]) -> str:
    """``"toml"``, ``"json"`` or ``"yaml"``, by the path's ending. Raises ``ConfigError`` for another."""
    file = Path(path)
    kind = SUFFIXES.get(file.suffix.lower())
    if kind is None:
        raise ConfigError(f"{file}: unknown ending {file.suffix!r}; use one of {', '.join(SUFFIXES)}.")
    return kind


def read_text(path: str | PathLike[str]) -> str:
    """A file's text. Raises ``ConfigError`` if it cannot be read, is not UTF-8, or has more than ``MAX_BYTES`` bytes."""
    file = Path(path)
    try:
        if file.exists() and not file.is_file():  # a pipe could keep us waiting
            raise ConfigError(f"{file}: not a regular file.")
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{file}: larger than {MAX_BYTES} bytes, which no config is.")
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: cannot be read: {error}") from None


def parse(text: str, kind: str, source: str) -> Parsed:
    """Parse the text of a file of a kind (``toml``, ``json`` or ``yaml``).

    Raises:
        ConfigError: malformed, a key given twice, too large or nested too deeply, not a table, or holding what is no plain
            value; the message has file and line where the format tells.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source}: larger than {MAX_BYTES} bytes, which no config is.")
    try:
        if kind == "toml":
            _bound_toml(text, source)
            values: Any = tomllib.loads(text)
            lines = _toml_lines(text)
        elif kind == "json":
            _bound_json(text, source)
            values = json.loads(text, parse_constant=_no_json_number)
            lines = _json_lines(text, source)
        else:
            lines = _yaml_lines(text, source)
            values = yaml.load(text, Loader=_Loader)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}:{error.lineno}: not valid JSON: {error.msg}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{source}{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    except RecursionError:
        _too_deep(source)
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # a number of thousands of digits, a date that is none; PyYAML's constructors fail in ways of their own (!!bool x)
        if isinstance(error, ConfigError):
            raise
        told = str(error) if isinstance(error, (ValueError, ArithmeticError)) else "a value does not fit its type"
        raise ConfigError(f"{source}: not valid {kind.upper()}: {told}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{source}: a precision config is a table of settings, not a {type(values).__name__}.")
    _require_plain(values, source, lines)
    return Parsed(values, lines)


def _too_deep(source: str) -> NoReturn:
    raise ConfigError(f"{source}: nested too deeply for a precision config (more than {MAX_DEPTH} levels).")


def _no_json_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _require_plain(values: Any, source: str, lines: Mapping[str, int]) -> None:
    """Refuse what JSON does not have, and more values or levels than a config has. Not recursive."""
    todo: list[tuple[str, Any, int]] = [("", values, 0)]
    count = 0
    while todo:
        key, value, depth = todo.pop()
        count += 1
        if depth > MAX_DEPTH:
            _too_deep(source)
        if count > MAX_VALUES:
            raise ConfigError(f"{source}: holds more than {MAX_VALUES} values, which no config does.")
        where = f"{source}:{lines[key]}: {key}" if key in lines else f"{source}: {key}"
        if isinstance(value, dict):
            for name, item in value.items():
                if not isinstance(name, str):
                    raise ConfigError(f"{where}: the key {name!r} is not a string.")
                _require_text(name, where)
                todo.append((f"{key}.{name}" if key else name, item, depth + 1))
        elif isinstance(value, list):
            todo += [(f"{key}.{index}", item, depth + 1) for index, item in enumerate(value)]
        elif isinstance(value, str):
            _require_text(value, where)
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ConfigError(f"{where}: the number has more than 64 bits.")
        elif value is not None and not isinstance(value, (bool, int, float)):
            raise ConfigError(f"{where}: a {type(value).__name__} is no setting; quote it if text is meant.")


def _require_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: holds half a character (a lone surrogate).") from None


# ---- lines, duplicate keys and bounds ----------------------------------------------------------------------------


def _bound_json(text: str, source: str) -> None:
    """Refuse deep nesting before a recursive parser sees it."""
    depth = 0
    for token in re.finditer(
        r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', text, re.DOTALL
    ):  # a string without an end is passed once
        first = token[0][0]
        depth += (first in "[{") - (first in "]}")
        if depth > MAX_DEPTH:
            _too_deep(source)


def _bound_toml(text: str, source: str) -> None:
    """Refuse long dotted keys before tomllib sees them: it takes time with the square of their length."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") <= MAX_DEPTH:
            continue
        head, sign, _ = line.partition("=")
        is_key = bool(sign) or line.lstrip().startswith("[")
        if (is_key and head.count(".") > MAX_DEPTH) or line.count(".") > 4 * MAX_DEPTH:
            raise ConfigError(
                f"{source}:{number}: a key of more than {MAX_DEPTH} parts, or a line that could hold one."
            )


def _json_lines(text: str, source: str) -> dict[str, int]:
    """Lines of the keys of valid JSON, by reading it as YAML; none where YAML cannot (tabs)."""
    json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, text, source))
    try:
        return _yaml_lines(text, source)
    except yaml.YAMLError:
        return {}


def _once(pairs: list[tuple[str, Any]], text: str, source: str) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        with contextlib.suppress(yaml.YAMLError):
            _yaml_lines(text, source)  # tells the line
        seen: set[str] = set()
        again = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ConfigError(f"{source}: {again}: given twice.", [(again, "given twice")])


class _Open:
    """A mapping or sequence being read: its dotted key, the name of the item that comes next, how many values it holds."""

    def __init__(self, key: str, mapping: bool, anchor: str | None) -> None:
        self.key, self.mapping, self.anchor = key, mapping, anchor
        self.name: str | None = None
        self.seen: set[str] = set()
        self.items = 0
        self.size = 1


def _bound_number(event: Any, source: str) -> None:
    """Refuse long numbers: PyYAML reads 1:1:1:1 in base 60, in time with the square of its length."""
    if len(event.value) <= 100 or event.tag == "tag:yaml.org,2002:str":
        return
    tagged = event.tag is not None and event.tag != "!"
    if tagged or (
        event.implicit[0] and re.fullmatch(r"[-+\w:.]+", event.value) and event.value.lstrip("-+")[:1].isdigit()
    ):
        line = event.start_mark.line + 1
        raise ConfigError(
            f"{source}:{line}: a number (or a tagged value) of {len(event.value)} characters is no setting."
        )


def _yaml_lines(text: str, source: str) -> dict[str, int]:
    """The line of each dotted key, from the parser's events: bounded in depth, and in size with aliases written out."""
    lines: dict[str, int] = {}
    sizes: dict[str, int] = {}
    stack: list[_Open] = []

    def begin(event: Any) -> str:
        """Note a value that starts; its dotted key."""
        if not stack:
            return ""
        top = stack[-1]
        if not top.mapping:
            key = f"{top.key}{top.items}"
            lines.setdefault(key, event.start_mark.line + 1)
            top.items += 1
            return key
        key, top.name = f"{top.key}{top.name}", None
        return key

    def end(size: int, anchor: str | None) -> None:
        if anchor is not None:
            sizes[anchor] = size
        if stack:
            stack[-1].size += size
        if size > MAX_VALUES or (stack and stack[-1].size > MAX_VALUES):
            raise ConfigError(f"{source}: holds more than {MAX_VALUES} values, which no config does.")

    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1
        wants_name = bool(stack) and stack[-1].mapping and stack[-1].name is None
        if isinstance(event, yaml.ScalarEvent):
            _bound_number(event, source)
            if wants_name:
                top = stack[-1]
                key = f"{top.key}{event.value}"
                if event.value in top.seen:
                    raise ConfigError(f"{source}:{line}: {key}: given twice.", [(key, "given twice")])
                top.seen.add(event.value)
                lines.setdefault(key, line)
                top.name = event.value
            else:
                begin(event)
            end(1, event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ConfigError(f"{source}:{line}: *{event.anchor} refers to what it is part of.")
            if wants_name:
                stack[-1].name = f"*{event.anchor}"
            else:
                begin(event)
            end(sizes[event.anchor], None)
        elif isinstance(event, yaml.CollectionStartEvent):
            if wants_name:
                raise ConfigError(f"{source}:{line}: a key must be text, not a list or a table.")
            key = begin(event)
            stack.append(_Open(f"{key}." if key else "", isinstance(event, yaml.MappingStartEvent), event.anchor))
            if len(stack) > MAX_DEPTH:
                _too_deep(source)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = stack.pop()
            end(done.size, done.anchor)
    return lines


def _toml_lines(text: str) -> dict[str, int]:
    """The line of each key of a TOML file that is known to be valid (tomllib keeps no positions)."""
    lines: dict[str, int] = {}
    prefix, counts = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            body, closed, _ = stripped.lstrip("[").partition("]")
            name = _bare(body)
            if not closed or not name or len(name) > 400:  # an array's line, or no key that a person wrote
                continue
            if stripped.startswith("[["):
                counts[name] = counts.get(name, -1) + 1
                name = f"{name}.{counts[name]}"
            lines.setdefault(name, number)
            prefix = f"{name}."
        else:
            key, sign, _ = stripped.partition("=")
            name = _bare(key)
            if sign and name and len(name) <= 400:
                lines.setdefault(prefix + name, number)
    return lines


_KEY = re.compile(r"[\w.\-\s\"']+")


def _bare(key: str) -> str:
    """A key without quotes and blanks; empty if it is none."""
    return re.sub(r"[\s\"']", "", key) if _KEY.fullmatch(key) else ""
