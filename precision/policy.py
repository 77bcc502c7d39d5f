"""``PrecisionPolicy``: what runs, is stored and leaves in which dtype, written once for every framework."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from os import PathLike
from typing import Any

import pydantic

from precision._model import FrozenModel
from precision.errors import PolicyError
from precision.formats import canonical_dtype
from precision.loss_scale import LossScale
from precision.ops import canonical_family


class Rule(FrozenModel):
    """An exception to the policy: a module (by path pattern) or an op family that runs in another dtype.

    Attributes:
        module: pattern over dotted module paths, as frameworks name them (``/`` counts as ``.``). ``*`` matches within
            one part, ``**`` across parts, ``?`` one character. A pattern that matches a module covers what is inside it.
        family: an op family's name. Exactly one of ``module`` and ``family`` is given.
        dtype: the dtype that modules or ops so matched keep their parameters and compute in.

    Example:
        >>> Rule(module="encoder.*.norm", dtype="float32").matches("encoder/3/norm/scale")
        True
    """

    module: str | None = None
    family: str | None = None
    dtype: str

    @pydantic.field_validator("dtype", mode="before")
    @classmethod
    def _dtype(cls, value: Any) -> str:
        return canonical_dtype(value)

    @pydantic.field_validator("family")
    @classmethod
    def _family(cls, value: str | None) -> str | None:
        return None if value is None else canonical_family(value)

    @pydantic.model_validator(mode="after")
    def _one_target(self) -> Rule:
        if (self.module is None) == (self.family is None):
            raise PolicyError("a rule names exactly one of module and family")
        if self.module is not None and not self.module.strip("./ "):
            raise PolicyError("a rule's module pattern must not be empty; use '**' for every module")
        return self

    def matches(self, path: str) -> bool:
        """Whether this is a module rule that covers the module (or parameter) at a path."""
        return self.module is not None and _matcher(self.module)(_dotted(path))


def _dotted(path: str) -> str:
    return path.replace("/", ".").strip(".")


@lru_cache(maxsize=1024)
def _matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a path is covered, as a function. A regular expression where it cannot go astray among many wildcards."""
    tokens = tuple(token for token in re.split(r"(\*\*|\*|\?)", _dotted(pattern)) if token)
    if sum(token in _WILDCARDS for token in tokens) > 4:
        return partial(_walk, tuple(t for token in tokens for t in ((token,) if token in _WILDCARDS else token)))
    body = "".join(_WILDCARDS.get(token) or re.escape(token) for token in tokens)
    expression = re.compile(rf"{body}(\..*)?\Z")
    return lambda path: expression.match(path) is not None


_WILDCARDS = {"**": ".*", "*": "[^.]*", "?": "[^.]"}


def _walk(tokens: tuple[str, ...], path: str) -> bool:
    """The same, going all ways at once: the time is that of pattern times path, whatever they are."""

    def onward(states: set[int]) -> set[int]:
        for state in sorted(states):
            while state < len(tokens) and tokens[state] in ("*", "**"):  # which may match nothing
                state += 1
                states.add(state)
        return states

    states = onward({0})
    for character in path:
        if character == "." and len(tokens) in states:
            return True
        after: set[int] = set()
        for state in states - {len(tokens)}:
            token = tokens[state]
            if token == "**" or (token == "*" and character != "."):
                after.add(state)
            elif token == character or (token == "?" and character != "."):
                after.add(state + 1)
        states = onward(after)
    return len(tokens) in states


class PrecisionPolicy(FrozenModel):
    """One precision policy for every framework. Frozen, hashable (a static argument of ``jax.jit``), validated.

    Attributes:
        param_dtype: dtype parameters are kept in; float32 here means master weights.
        compute_dtype: dtype that matmuls, convolutions and attention run in.
        output_dtype: dtype in which results leave (model outputs, losses).
        reduce_dtype: dtype in which gradients are reduced over replicas and accumulated.
        rules: exceptions, first match wins.
        loss_scale: how the loss is scaled.
        emulate: whether low formats are emulated: float32 arithmetic rounded at op boundaries.

    Raises:
        PolicyError: a value is unknown, out of range or contradicts another.

    Example:
        >>> policy = PrecisionPolicy.from_name("mixed_float16")
        >>> policy.param_dtype, policy.compute_dtype, policy.loss_scale.mode
        ('float32', 'float16', 'dynamic')
    """

    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    output_dtype: str = "float32"
    reduce_dtype: str = "float32"
    rules: tuple[Rule, ...] = ()
    loss_scale: LossScale = LossScale()
    emulate: bool = False

    @pydantic.field_validator("param_dtype", "compute_dtype", "output_dtype", "reduce_dtype", mode="before")
    @classmethod
    def _dtype(cls, value: Any) -> str:
        return canonical_dtype(value)

    @pydantic.field_validator("rules", mode="before")
    @classmethod
    def _rules(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @pydantic.model_validator(mode="after")
    def _no_conflicting_rules(self) -> PrecisionPolicy:
        seen: dict[tuple[str | None, str | None], str] = {}
        for rule in self.rules:
            key = (rule.module, rule.family)
            if seen.setdefault(key, rule.dtype) != rule.dtype:
                what = f"module {rule.module!r}" if rule.module else f"family {rule.family!r}"
                raise PolicyError(
                    f"two rules give {what} different dtypes: {seen[key]} and {rule.dtype}; the second could never apply"
                )
        return self

    @classmethod
    def from_name(cls, name: str) -> PrecisionPolicy:
        """Resolve a preset or another tool's spelling; see :mod:`precision.names` for the whole list.

        Raises:
            PolicyError: the spelling is unknown or means different things on different devices.

        Example:
            >>> PrecisionPolicy.from_name("16-mixed") == PrecisionPolicy.from_name("O1")
            True
        """
        from precision.names import policy_from_name

        return policy_from_name(name)

    def to_name(self, style: str = "keras") -> str:
        """The spelling of this policy in a tool's style: ``keras``, ``lightning``, ``accelerate``, ``apex`` or ``jmp``.

        Raises:
            PolicyError: that style has no name for this policy.
        """
        from precision.names import policy_to_name

        return policy_to_name(self, style)

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> PrecisionPolicy:
        """Read a ``.toml``, ``.json`` or ``.yaml`` file; see :mod:`precision.config`.

        Raises:
            ConfigError: the file is missing, malformed or not valid; names file, key and line where they are known.
        """
        from precision.config import read_policy

        return read_policy(path)

    def to_file(self, path: str | PathLike[str]) -> None:
        """Write a ``.toml``, ``.json`` or ``.yaml`` file (chosen by its ending) that reads back to an equal policy."""
        from precision.config import write_policy

        write_policy(self, path)

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain values; settings that have no effect are left out."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        plain["rules"] = [rule.model_dump(exclude_none=True) for rule in self.rules]
        plain["loss_scale"] = self.loss_scale.effective()
        return plain

    @property
    def module_rules(self) -> tuple[Rule, ...]:
        """The rules that name module paths, in order."""
        return tuple(rule for rule in self.rules if rule.module is not None)

    @property
    def family_rules(self) -> tuple[Rule, ...]:
        """The rules that name op families, in order."""
        return tuple(rule for rule in self.rules if rule.family is not None)

    @property
    def is_mixed(self) -> bool:
        """Whether parameters are kept in another dtype than ops compute in."""
        return self.param_dtype != self.compute_dtype

    def rule_for(self, path: str) -> Rule | None:
        """The first rule that covers a module or parameter path, or None."""
        return next((rule for rule in self.rules if rule.matches(path)), None)

    def unmatched_rules(self, paths: list[str]) -> tuple[Rule, ...]:
        """The module rules that cover none of the given paths: usually a misspelt pattern."""
        return tuple(rule for rule in self.module_rules if not any(rule.matches(path) for path in paths))

    def require_trainable(self) -> None:
        """Check that gradients computed under this policy will not silently vanish.

        Raises:
            PolicyError: ops, or the modules or ops of a rule, compute in float16 and the loss is not scaled.
        """
        if self.loss_scale.mode != "none":
            return
        low = next(
            (f"rules.{i}.dtype ({(r.module or r.family)!r})" for i, r in enumerate(self.rules) if r.dtype == "float16"),
            None,
        )
        field = "compute_dtype" if self.compute_dtype == "float16" else low
        if field is not None:
            raise PolicyError(
                f"training with {field} float16 and loss_scale.mode 'none' loses small gradients: those below 6e-8 "
                "become zero. Set loss_scale.mode to 'dynamic', or compute in bfloat16.",
                [("loss_scale.mode", f"must not be 'none' when {field} is float16")],
            )
