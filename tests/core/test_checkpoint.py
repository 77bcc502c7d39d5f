"""The checkpoint store: killed at any file operation, it holds the last complete checkpoint; damage is an error that says so."""

import json
import os
import signal
import sys

import pytest

from precision import CheckpointError, CheckpointStore


def save(store: CheckpointStore, step: int, text: str = "", **kwargs) -> None:
    with store.saving(step, backend="numpy", **kwargs) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "weights").write_text(text or f"weights of {step}")
        (folder / "other").write_text("x")


def read(store: CheckpointStore, step: int | None = None) -> tuple[int, str]:
    folder, manifest = store.open(step)
    return manifest.step, (folder / "deep" / "weights").read_text()


def killed_at(operation: int, work) -> bool:
    """Run ``work`` in a child that SIGKILLs itself at its n-th file operation; whether it was killed."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, _: object) -> None:
            nonlocal count
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"):
                count += 1
                if count > operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_saves_and_finds_the_last_and_keeps_as_many_as_asked(tmp_path):
    store = CheckpointStore(tmp_path / "run", keep=2)
    assert store.latest() is None
    assert store.steps() == []
    for step in (1, 5, 20):
        save(store, step, about={"epoch": step})
    assert store.steps() == [5, 20]
    assert read(store) == (20, "weights of 20")
    assert read(store, 5) == (5, "weights of 5")
    manifest = store.open(backend="numpy")[1]
    assert manifest.about == {"epoch": 20}
    assert manifest.world_size == 1
    assert set(manifest.files) == {"deep/weights", "other"}


def test_a_step_saved_again_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    for text in ("first", "second", "third"):
        save(store, 3, text)
    assert store.steps() == [3]
    assert read(store) == (3, "third")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("keep", [None, 1])
def test_killed_at_any_file_operation_the_last_complete_checkpoint_is_there(tmp_path, keep):
    points = 0
    while True:
        directory = tmp_path / str(points)
        store = CheckpointStore(directory, keep=keep)
        save(store, 1)
        save(store, 2, "before")
        done = not killed_at(points, lambda store=store: (save(store, 2, "again"), save(store, 3)))
        step, text = read(store)
        assert (step, text) in ((2, "before"), (2, "again"), (3, "weights of 3"))
        for each in store.steps():
            read(store, each)
        save(store, 9)  # and the next run goes on, whatever was left behind
        assert read(store) == (9, "weights of 9")
        assert not list(directory.glob(".*"))
        if done:
            break
        points += 1
    assert points > 30  # the kills did reach into the save


def test_what_is_truncated_altered_or_missing_is_named_and_an_older_one_offered(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    file = store.path(2) / "deep" / "weights"
    whole = file.read_text()
    for bad in (whole[:-1], whole.replace("w", "v"), None):
        file.unlink() if bad is None else file.write_text(bad)
        with pytest.raises(CheckpointError, match=r"deep/weights.*Nothing was loaded.*step=1"):
            store.open()
        assert read(store, 1) == (1, "weights of 1")
    file.write_text(whole)
    assert read(store) == (2, whole)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "[]", "not of the format"),
        (lambda text: "[" * 100_000, "cannot be read"),
        (lambda text: json.dumps({**json.loads(text), "format": "other"}), "not of the format"),
        (lambda text: json.dumps({**json.loads(text), "version": 99}), "version 99"),
        (lambda text: json.dumps({**json.loads(text), "step": 4}), "renamed"),
        (lambda text: json.dumps({**json.loads(text), "files": {"../../etc/passwd": [1, "0"]}}), "damaged"),
        (lambda text: json.dumps({**json.loads(text), "files": {"other": [True, "0"]}}), "damaged"),
        (lambda text: json.dumps({**json.loads(text), "files": []}), "damaged"),
        (lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "about"}), "damaged"),
    ],
)
def test_a_foreign_or_damaged_manifest_is_an_error(tmp_path, change, says):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    manifest = store.path(1) / "manifest.json"
    manifest.write_text(change(manifest.read_text()))
    with pytest.raises(CheckpointError, match=says):
        store.open()


def test_a_folder_of_other_things_holds_no_checkpoint(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(CheckpointError, match=r"no manifest\.json: another program wrote it"):
        CheckpointStore(tmp_path).open()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 7; it has: 1"):
        CheckpointStore(tmp_path).open(7)
    (tmp_path / "step-00000001").rmdir()
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint.*model\.safetensors"):
        CheckpointStore(tmp_path).open()
    with pytest.raises(CheckpointError, match="is a file"):
        CheckpointStore(tmp_path / "model.safetensors")


def test_another_backends_checkpoint_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(CheckpointError, match="written by backend 'numpy', not 'torch'"):
        store.open(backend="torch")


@pytest.mark.parametrize("where", ["inside", "elsewhere"])
def test_a_save_that_fails_in_any_process_changes_nothing(tmp_path, where):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    answers = iter([True, where == "inside"])
    with (
        pytest.raises(CheckpointError, match="another process failed" if where == "elsewhere" else "disk is full"),
        store.saving(2, backend="numpy", agree=lambda ok: ok and next(answers)) as folder,
    ):
        (folder / "part").write_text("half")
        if where == "inside":
            raise OSError("disk is full")
    assert read(store) == (1, "weights of 1")
    assert store.steps() == [1]


def test_processes_that_do_not_coordinate_write_but_do_not_commit(tmp_path):
    store, calls = CheckpointStore(tmp_path), []

    def agree(ok: bool) -> bool:
        calls.append(ok)
        return ok

    (tmp_path / ".writing-4").mkdir()
    with store.saving(4, backend="numpy", coordinator=False, agree=agree) as folder:
        (folder / "rank1").write_text("mine")
    assert calls == [True] * 3
    assert store.steps() == []
    assert (tmp_path / ".writing-4" / "rank1").read_text() == "mine"


@pytest.mark.parametrize("step", [-1, True, 1.0, "1"])
def test_a_step_is_a_whole_number(tmp_path, step):
    with pytest.raises(CheckpointError, match="whole number"):
        save(CheckpointStore(tmp_path), step)


@pytest.mark.parametrize("about", [{"x": object()}, {"x": float("nan")}, {1: 2}, {"x": (1, 2)}])
def test_what_a_checkpoint_says_of_itself_is_json(tmp_path, about):
    with pytest.raises(CheckpointError, match="JSON"):
        save(CheckpointStore(tmp_path), 1, about=about)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_keep_is_a_whole_number(tmp_path, keep):
    with pytest.raises(CheckpointError, match="keep"):
        CheckpointStore(tmp_path, keep=keep)
