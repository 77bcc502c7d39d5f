"""Keeps what frameworks' native code prints on standard error while it loads out of a command's output."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Hold back the process's standard error; if the body raises, what was held back is printed after all."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            if failed:
                held.seek(0)
                os.write(2, held.read())
