"""What every target is made of: its table of fields, the way out with what is lost, and the way in with what is kept.

A target's file holds ``to_<name>``, ``from_<name>`` and a :class:`Target` called ``TARGET`` that ties them together.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from precision.errors import InteropError, UnsupportedError
from precision.policy import PrecisionPolicy


@dataclasses.dataclass(frozen=True)
class Field:
    """A row of a target's table of fields.

    Attributes:
        theirs: dotted name in the target's config.
        ours: dotted name in the policy; empty for a field that the target needs and the policy does not decide.
        how: how one becomes the other, in a few words.
    """

    theirs: str
    ours: str
    how: str


@dataclasses.dataclass(frozen=True)
class Lost:
    """A field of the policy that the target cannot express.

    Attributes:
        field: dotted name in the policy.
        value: what the policy says, as a plain value.
        instead: what the target will do, as a sentence.
    """

    field: str
    value: Any
    instead: str

    def __str__(self) -> str:
        return f"{self.field} = {json.dumps(self.value)}: {self.instead}"


@dataclasses.dataclass(frozen=True)
class Export:
    """A config for a target.

    Attributes:
        target: the target's name.
        config: plain values, or a string where the target's config is one. Every field is written, none left to a default.
        lost: what the target cannot express.
        notes: what is expressed, but acts differently there.
    """

    target: str
    config: Any
    lost: tuple[Lost, ...] = ()
    notes: tuple[str, ...] = ()

    def require(self) -> Export:
        """Give it back if nothing was lost.

        Raises:
            InteropError: something was; names each field and what the target will do instead.
        """
        if self.lost:
            raise InteropError(
                f"{self.target} cannot express all of this policy: {'; '.join(map(str, self.lost))}.", lost=self.lost
            )
        return self


@dataclasses.dataclass(frozen=True)
class Import:
    """What a target's config says about precision.

    Attributes:
        source: the target's name.
        policy: the policy it amounts to.
        rest: all of the config that is not about precision, unchanged; give it as ``base`` to write the config again.
        notes: what the target does that a policy does not say, and defaults that were assumed.
    """

    source: str
    policy: PrecisionPolicy
    rest: Any = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Target:
    """A tool whose config can be written and read.

    Attributes:
        name: what it is asked for by.
        title: what people call it.
        fields: its table of fields.
        export: ``export(policy, base=..., strict=...) -> Export``, with the tool's own options besides.
        read: ``read(config) -> Import``.
        recognises: whether plain values (or a string) look like its config.
        kinds: the kinds of file it is written as, the usual one first: ``json``, ``yaml``, ``toml`` or ``text``.
        home: what is read inside a file that holds more: dotted key of the part, empty for all of it.
    """

    name: str
    title: str
    fields: tuple[Field, ...]
    export: Callable[..., Export]
    read: Callable[[Any], Import]
    recognises: Callable[[Any], bool]
    kinds: tuple[str, ...] = ("json",)


class Losses:
    """Collects what a target cannot express while a config is being made."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy
        self.lost: list[Lost] = []
        self.notes: list[str] = []

    def unless(self, same: bool, field: str, instead: str) -> None:
        """Note that a field is lost, unless the target does the same."""
        if not same:
            self.lost.append(Lost(field, plain_field(self.policy, field), instead))

    def against(self, meant: PrecisionPolicy, instead: Mapping[str, str]) -> None:
        """Note as lost every field in which the config that was made means something else.

        Args:
            meant: what the config means, as reading it gives.
            instead: what the target does instead, as sentences by field, or by section (``loss_scale``).
        """
        fields = differing_fields(self.policy, meant)
        if "loss_scale.mode" in fields:  # the settings of two modes cannot be told one by one
            fields = [*(field for field in fields if not field.startswith("loss_scale.")), "loss_scale"]
        for field in fields:
            self.unless(False, field, instead.get(field) or instead[field.partition(".")[0]])

    def note(self, text: str) -> None:
        """Note what is expressed but acts differently."""
        if text not in self.notes:
            self.notes.append(text)

    def export(self, target: str, config: Any, strict: bool) -> Export:
        """The export; an error if ``strict`` and something is lost."""
        export = Export(target, config, tuple(self.lost), tuple(self.notes))
        return export.require() if strict else export


def plain_field(policy: PrecisionPolicy, field: str) -> Any:
    """A policy's field by dotted name, as a plain value (rules as mappings)."""
    if field == "rules":
        return [rule.model_dump(exclude_none=True) for rule in policy.rules]
    value: Any = policy
    for part in field.split("."):
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    if field == "loss_scale":
        return policy.loss_scale.effective()
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value


def differing_fields(a: PrecisionPolicy, b: PrecisionPolicy) -> list[str]:
    """Dotted names of the fields in which two policies differ in effect, in order."""
    names = [name for name in type(a).model_fields if name != "loss_scale" and getattr(a, name) != getattr(b, name)]
    x, y = a.loss_scale.effective(), b.loss_scale.effective()
    for key in dict.fromkeys((*x, *y)):
        if x.get(key) != y.get(key):
            names.append(f"loss_scale.{key}")
    return names


def require_same_effect(
    asked: PrecisionPolicy, found: PrecisionPolicy, tool: str, remedy: str, not_said: Iterable[str]
) -> None:
    """Refuse to go on if a tool would do something else than the policy asked for.

    Args:
        asked: the policy asked for.
        found: the policy that the tool, as it is set up, amounts to.
        tool: what people call it.
        remedy: the module whose objects follow the policy.
        not_said: dotted fields that no setting of the tool says, which an export tells of.

    Raises:
        UnsupportedError: names each field with what would happen and what was asked for.
    """
    fields = [field for field in differing_fields(asked, found) if field not in set(not_said)]
    if "loss_scale.mode" in fields:
        fields = [field for field in fields if not field.startswith("loss_scale.") or field == "loss_scale.mode"]
    if fields:
        told = "; ".join(f"{f} would be {plain_field(found, f)!r}, not {plain_field(asked, f)!r}" for f in fields)
        raise UnsupportedError(
            f"{tool} would not do what the policy says: {told}. Use {remedy}, or a policy that says what is wanted."
        )


# ---- reading plain values ----------------------------------------------------------------------------------------


class Section:
    """A mapping that is being read: takes known keys out, checks their types, and keeps the rest.

    Args:
        values: the mapping; it is copied.
        where: how errors call it.

    Raises:
        InteropError: it is no mapping; or, from the methods, a value is not of the kind it must be.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise InteropError(f"{where} must be a table with names for keys, not {shown(values)}.")
        try:
            self.rest: dict[str, Any] = copy.deepcopy(dict(values))
        except RecursionError:
            raise InteropError(f"{where} is nested too deeply for a config.") from None
        self.where = where

    def name(self, key: str) -> str:
        """How errors call a key."""
        return f"{self.where}: {key}"

    def take(self, key: str, default: Any = None) -> Any:
        """Take a value out, whatever it is."""
        return self.rest.pop(key, default)

    def flag(self, key: str, default: bool | None = None, words: tuple[str, ...] = ()) -> Any:
        """Take out a boolean (or one of ``words``)."""
        value = self.take(key, default)
        if isinstance(value, bool) or value is default or (isinstance(value, str) and value in words):
            return value
        allowed = ", ".join(("true", "false", *map(repr, words)))
        raise InteropError(f"{self.name(key)} must be one of {allowed}, not {shown(value)}.")

    def number(self, key: str, default: float | None = None) -> float | None:
        """Take out a finite number, as a float."""
        value: object = self.take(key, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise InteropError(f"{self.name(key)} must be a finite number, not {shown(value)}.")
        return float(value)

    def whole(self, key: str, default: int | None = None, least: int = 0) -> int | None:
        """Take out a whole number of at least ``least`` and below 2**31."""
        value: object = self.take(key, default)
        if value is default:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise InteropError(f"{self.name(key)} must be a whole number of at least {least}, not {shown(value)}.")
        return value

    def word(self, key: str, allowed: Iterable[str], default: str | None = None) -> str | None:
        """Take out one of some words."""
        value: object = self.take(key, default)
        if value is default:
            return default
        known = list(allowed)
        if isinstance(value, str) and value in known:
            return value
        raise InteropError(f"{self.name(key)} must be one of {', '.join(known)}, not {shown(value)}.")

    def section(self, key: str) -> Section | None:
        """Take out a table; None if it is not there."""
        value = self.take(key)
        return None if value is None else Section(value, self.name(key))

    def keep(self, key: str, inner: Section | None) -> None:
        """Put back what was left of a table that was taken out, if anything was."""
        if inner is not None and inner.rest:
            self.rest[key] = inner.rest


def merged(base: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` laid over a copy of ``base``, table by table. Raises ``InteropError`` if ``base`` is no table."""
    if base is None:
        return dict(config)
    out = Section(base, "base").rest
    for key, value in config.items():
        if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merged(out[key], value)
        else:
            out[key] = value
    return out


def shown(value: Any) -> str:
    """A value for an error message, cut to a readable length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or endless nesting
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
