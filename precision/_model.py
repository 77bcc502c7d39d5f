"""The pydantic base of the frozen config values: strict types, unknown keys refused, errors of our own type."""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic

from precision.errors import PolicyError, nearest

Self = TypeVar("Self", bound="FrozenModel")


class FrozenModel(pydantic.BaseModel):
    """A frozen, hashable, strictly typed value whose validation errors are ``PolicyError``."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except pydantic.ValidationError as error:
            problems = tuple(_problems(type(self), error))
            lines = "; ".join(f"{key}: {message}" if key else message for key, message in problems)
            raise PolicyError(f"{type(self).__name__}: {lines}", problems) from None

    def with_(self: Self, **changes: Any) -> Self:
        """Return a copy with the given fields changed, validated again.

        Raises:
            PolicyError: a field is unknown, or the result is not valid.
        """
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


def _problems(cls: type[FrozenModel], error: pydantic.ValidationError) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, PolicyError) and inner.problems:
            found += [(f"{key}.{k}" if key else k, message) for k, message in inner.problems]
        elif item["type"] == "extra_forbidden":
            known = list(cls.model_fields)
            found.append((key, f"unknown key. Known: {', '.join(known)}.{nearest(key.split('.')[-1], known)}"))
        else:
            message = str(inner) if inner is not None else item["msg"]
            given = item.get("input")
            shown = f" (given: {given!r})" if inner is None and not isinstance(given, dict) else ""
            found.append((key, message + shown))
    return found
