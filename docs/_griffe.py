"""Reads this project's docstrings for the API reference: an ``Example:`` section holds doctests, as ``Examples:`` does."""

import re

import griffe

_EXAMPLE = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Renames the section before griffe parses it (which knows the plural only)."""

    def on_object(self, *, obj, **_):
        """Called for each module, class, function and attribute as it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
