"""Turns the roles in docstrings (``:class:`precision.LossScaler` ``) into links to the API reference where it has them."""

import re

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>([^<]+)</code>")


def on_page_content(html, **_):
    """Replace each role by a reference that the autorefs plugin resolves, or leaves as code."""
    return _ROLE.sub(_link, html)


def _link(match):
    target = match[1].lstrip("~.!")
    text = target.rpartition(".")[2] if match[1][0] in "~." else target
    return f'<autoref identifier="{target}" optional><code>{text}</code></autoref>'
