"""The code blocks of a Markdown page: found, told apart by framework, and run.

As a script it runs the blocks of pages given as JSON on standard input, and writes what happened to the file named in
its argument: one process a framework, a namespace and a folder a page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import linecache
import os
import re
import sys
import traceback
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<lang>[\w-]*)(?P<info>[^`]*)$")
TITLE = re.compile(r'title="([^"]*)"')
USES = {
    "torch": re.compile(r'\b(?:import|from) torch\b|backend="(?:torch|pytorch)"|\bprecision_torch\b'),
    "tensorflow": re.compile(
        r'\b(?:import|from) (?:tensorflow|keras)\b|backend="(?:tensorflow|tf|keras)"|\bprecision_tensorflow\b'
    ),
    "jax": re.compile(
        r'\b(?:import|from) (?:jax|optax|flax|equinox|haiku|jmp|orbax)\b|backend="jax"|\bprecision_jax\b'
    ),
}


@dataclasses.dataclass
class Block:
    """A fenced block.

    Attributes:
        line: of its first line of code in the page, from 1.
        lang, title: from the opening fence.
        code: its text.
        frameworks: which frameworks it uses, sorted; those of the block before it where it names none.
        prints: what it is said to print (a ``text`` block titled "output" right after it), or None.
    """

    line: int
    lang: str
    title: str
    code: str
    frameworks: tuple[str, ...] = ()
    prints: str | None = None


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, in order; blocks inside tabs and lists lose their indentation."""
    found: list[Block] = []
    lines = text.splitlines()
    at, last_end = 0, -1
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        indent = opening["indent"]
        end = next(i for i in range(at + 1, len(lines)) if lines[i].rstrip() == f"{indent}```")
        code = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end]) + "\n"
        title = TITLE.search(opening["info"])
        block = Block(at + 2, opening["lang"], title[1] if title else "", code)
        if block.title == "output" and found and not any(line.strip() for line in lines[last_end + 1 : at]):
            found[-1].prints = code
        if block.lang == "python":
            named = tuple(sorted(name for name, uses in USES.items() if uses.search(code)))
            before = [b for b in found if b.lang == "python"]
            block.frameworks = named or (before[-1].frameworks if before else ())
        found.append(block)
        at, last_end = end + 1, end
    return found


def groups_of(blocks: list[Block]) -> list[tuple[str, ...]]:
    """The sets of frameworks whose blocks run together in a process: those that a block names, or none at all."""
    groups = list(dict.fromkeys(b.frameworks for b in blocks if b.lang == "python"))
    return [g for g in groups if g] or groups


def run_page(page: str, folder: str, blocks: list[Block]) -> str | None:
    """Run blocks in order in one namespace, in a folder. Return what went wrong, or None."""
    os.chdir(folder)
    namespace: dict[str, object] = {"__name__": "__main__", "__file__": str(Path(folder, page.replace("/", "_")))}
    for block in blocks:
        name = f"<{page}:{block.line}>"
        linecache.cache[name] = (len(block.code), None, block.code.splitlines(keepends=True), name)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(block.code, name, "exec"), namespace)
        except BaseException:  # whatever a block does, the next page still runs
            return f"{page}: the block at line {block.line} fails\n{traceback.format_exc()}"
        if block.prints is not None and printed.getvalue().strip() != block.prints.strip():
            return f"{page}: the block at line {block.line} prints\n{printed.getvalue()}\nnot\n{block.prints}"
    return None


def main() -> None:
    """Run the pages of standard input: ``[[page, folder, [block, ...]], ...]``."""
    results = {}
    for page, folder, blocks in json.load(sys.stdin):
        results[page] = run_page(page, folder, [Block(**block) for block in blocks])
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
