"""A folder of checkpoints that a kill at any moment leaves whole: what is complete is found, what is not is never read.

Each checkpoint is written into a folder of another name, listed with sizes and digests in ``manifest.json``, forced to
disk, and renamed. The frameworks' own writers (PyTorch distributed checkpoint, ``tf.train.Checkpoint``, Keras, Orbax)
write the files; this module only decides when they count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from precision.errors import CheckpointError

FORMAT = "precision-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_WRITING, _DELETING = ".writing-", ".deleting-"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: the training step it was taken after.
        backend: name of the backend that wrote it.
        world_size: how many processes or replicas wrote it.
        about: JSON values the writer added.
        files: size in bytes and SHA-256 (hexadecimal) of each file, by path relative to the checkpoint.
    """

    step: int
    backend: str
    world_size: int
    about: dict[str, Any]
    files: dict[str, tuple[int, str]]


class CheckpointStore:
    """Checkpoints of one run in one folder, by step.

    One run writes at a time; any number of processes of that run may take part.

    Args:
        directory: made when the first checkpoint is saved.
        keep: how many complete checkpoints to keep; older ones are deleted after a save. None keeps all.

    Raises:
        CheckpointError: ``keep`` is not a whole number of at least 1, or ``directory`` is a file.

    Example:
        >>> import tempfile
        >>> store = CheckpointStore(tempfile.mkdtemp(), keep=2)
        >>> for step in (10, 20, 30):
        ...     with store.saving(step, backend="numpy") as folder:
        ...         _ = (folder / "weights.txt").write_text(str(step))
        >>> store.steps()
        [20, 30]
        >>> folder, manifest = store.open()
        >>> manifest.step, (folder / "weights.txt").read_text()
        (30, '30')
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = None) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(f"keep must be a whole number of at least 1, or None to keep all; not {keep!r}.")
        self.directory = Path(directory)
        self.keep = keep
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is a file; checkpoints need a folder.")

    # ---- what is there -------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first. Does not verify their contents; :meth:`open` does."""
        return sorted(self._complete())

    def latest(self) -> int | None:
        """The last complete checkpoint's step; None if there is none."""
        return max(self._complete(), default=None)

    def path(self, step: int) -> Path:
        """The folder of a complete checkpoint.

        Raises:
            CheckpointError: there is none of that step; names those there are.
        """
        found = self._complete().get(step)
        if found is None:
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.directory} holds no complete checkpoint of step {step!r}; it has: {have}.")
        return found

    def open(self, step: int | None = None, *, backend: str | None = None) -> tuple[Path, Manifest]:
        """Verify a checkpoint file by file, and give its folder and manifest.

        Args:
            step: which; None for the last complete one.
            backend: the backend that must have written it; None for any.

        Raises:
            CheckpointError: there is none, it is truncated or damaged (names the file, and an older checkpoint to resume
                from), of another format or version, or of another backend.
        """
        if step is None:
            step = self.latest()
            if step is None:
                raise CheckpointError(f"{self.directory} holds no complete checkpoint.{self._hint()}")
        folder = self.path(step)
        manifest = self._verified(folder, step)
        if backend is not None and manifest.backend != backend:
            raise CheckpointError(
                f"{folder} was written by backend {manifest.backend!r}, not {backend!r}. Weights of one framework do not "
                "load in another; only the loss-scale state does (load_state_dict)."
            )
        return folder, manifest

    # ---- saving --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def saving(
        self,
        step: int,
        *,
        backend: str,
        world_size: int = 1,
        coordinator: bool = True,
        agree: Callable[[bool], bool] = bool,
        about: Mapping[str, Any] | None = None,
    ) -> Iterator[Path]:
        """Give the folder to write a checkpoint's files into; on leaving, make it count, all of it or nothing.

        Every process of the run enters and leaves together. A step that is there already is replaced once the new
        checkpoint is complete.

        Args:
            step: training steps taken so far, at least 0.
            backend: name of the writing backend.
            world_size: how many processes or replicas write.
            coordinator: True in exactly one process: it makes the folder, writes the manifest and renames.
            agree: called by every process at the same points with whether it is well; gives True to all if all are
                (a collective MIN). Also serves as the barrier. The default is for one process.
            about: JSON values to keep in the manifest.

        Raises:
            CheckpointError: a process failed (in all processes, with what failed as the cause where it did); a bad step;
                or values that are not JSON. The checkpoints that were there are as they were.
        """
        error: BaseException | None = None
        temporary = self.directory / f"{_WRITING}{step}"
        try:
            _require_step(step)
            listed = _json(about)
            if coordinator:
                self._begin(temporary)
        except Exception as problem:  # noqa: BLE001 - raised below, after the others have been told
            error = problem
        self._together(error, agree, step)
        try:
            yield temporary
        except Exception as problem:  # noqa: BLE001 - raised below, after the others have been told
            error = problem
        self._together(error, agree, step)
        if coordinator:
            try:
                self._commit(temporary, step, {"backend": backend, "world_size": world_size, "about": listed})
            except Exception as problem:  # noqa: BLE001 - raised below, after the others have been told
                error = problem
        self._together(error, agree, step)

    def _together(self, error: BaseException | None, agree: Callable[[bool], bool], step: int) -> None:
        well = agree(error is None)
        if error is not None:
            if isinstance(error, CheckpointError):
                raise error
            raise CheckpointError(
                f"the checkpoint of step {step!r} was not written: {type(error).__name__}: {error}. Those before are as "
                "they were."
            ) from error
        if not well:
            raise CheckpointError(
                f"the checkpoint of step {step!r} was not written: another process failed. Those before are as they were."
            )

    def _begin(self, temporary: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in (*self.directory.glob(f"{_WRITING}*"), *self.directory.glob(f"{_DELETING}*")):
            shutil.rmtree(leftover)  # of a run that was killed
        temporary.mkdir()

    def _commit(self, temporary: Path, step: int, fields: Mapping[str, Any]) -> None:
        files: dict[str, tuple[int, str]] = {}
        for path in _files(temporary):
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                os.fsync(stream.fileno())
            files[path.relative_to(temporary).as_posix()] = (path.stat().st_size, digest)
        content = {"format": FORMAT, "version": VERSION, "step": step, **fields, "files": files}
        with (temporary / MANIFEST).open("w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        for folder in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
            _sync_folder(folder)
        before = self._attempts(step)
        name = f"step-{step:08d}" + (f".{max(before) + 1}" if before else "")
        temporary.rename(self.directory / name)
        _sync_folder(self.directory)
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Delete what the new checkpoint replaces, and what is beyond ``keep``. Renamed first: half a folder never counts."""
        attempts = self._attempts(step)
        doomed = [folder for attempt, folder in attempts.items() if attempt != max(attempts)]
        if self.keep is not None:
            for old in [s for s in self.steps() if s != step][: max(len(self.steps()) - self.keep, 0)]:
                doomed += self._attempts(old).values()
        for folder in doomed:
            renamed = folder.with_name(_DELETING + folder.name)
            folder.rename(renamed)
            shutil.rmtree(renamed)

    # ---- reading -------------------------------------------------------------------------------------------------

    def _complete(self) -> dict[int, Path]:
        found: dict[int, tuple[int, Path]] = {}
        for step, attempt, folder in self._folders():
            found[step] = max(found.get(step, (-1, folder)), (attempt, folder))
        return {step: folder for step, (_, folder) in found.items()}

    def _attempts(self, step: int) -> dict[int, Path]:
        return {attempt: folder for each, attempt, folder in self._folders() if each == step}

    def _folders(self) -> Iterator[tuple[int, int, Path]]:
        if self.directory.is_dir():
            for folder in self.directory.iterdir():
                if (match := _COMPLETE.fullmatch(folder.name)) and folder.is_dir():
                    yield int(match[1]), int(match[2] or 0), folder

    def _hint(self) -> str:
        if self.directory.is_dir() and (others := sorted(path.name for path in self.directory.iterdir())):
            return f" What is there ({', '.join(others[:5])}) is not, or was not finished."
        return ""

    def _verified(self, folder: Path, step: int) -> Manifest:
        manifest = self._manifest(folder, step)
        for name, (size, digest) in manifest.files.items():
            path = folder / name
            if not path.is_file():
                raise self._damaged(folder, step, f"{name} is missing")
            if path.stat().st_size != size:
                raise self._damaged(folder, step, f"{name} has {path.stat().st_size} bytes, not {size}")
            with path.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                    raise self._damaged(folder, step, f"{name} is not what was written (its SHA-256 differs)")
        return manifest

    def _manifest(self, folder: Path, step: int) -> Manifest:
        try:
            content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self._damaged(folder, step, f"it has no {MANIFEST}: another program wrote it") from None
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(folder, step, f"{MANIFEST} cannot be read: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise self._damaged(folder, step, f"{MANIFEST} is not of the format {FORMAT!r}")
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"{folder} has version {content.get('version')!r}; this release reads version {VERSION}. Load it with the "
                "release that wrote it."
            )
        try:
            files = {_inside(name): (_whole(entry[0]), str(entry[1])) for name, entry in content["files"].items()}
            manifest = Manifest(
                step=_whole(content["step"]),
                backend=str(content["backend"]),
                world_size=_whole(content["world_size"]),
                about=dict(content["about"]),
                files=files,
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(folder, step, f"{MANIFEST} is damaged ({error!r})") from None
        if manifest.step != step:
            raise self._damaged(folder, step, f"{MANIFEST} says step {manifest.step}: the folder was renamed")
        return manifest

    def _damaged(self, folder: Path, step: int, what: str) -> CheckpointError:
        older = [each for each in self.steps() if each != step]
        instead = f" Resume from another: step={older[-1]}." if older else ""
        return CheckpointError(f"{folder} is not a whole checkpoint: {what}. Nothing was loaded.{instead}")


def _require_step(step: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"a checkpoint's step is a whole number of at least 0, not {step!r}.")


def _json(about: Mapping[str, Any] | None) -> dict[str, Any]:
    values = {} if about is None else dict(about)
    try:
        same = json.loads(json.dumps(values, allow_nan=False)) == values
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"what a checkpoint says about itself must be JSON values: {error}.") from None
    if not same:
        raise CheckpointError(
            "what a checkpoint says about itself must be JSON values that come back as they were: lists (no tuples) and "
            "mappings with str keys."
        )
    return values


def _inside(name: str) -> str:
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is no path inside the checkpoint")
    return name


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
