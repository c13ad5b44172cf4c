"""Saves that fail: kills, errors of the system, several writers."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import zlib

import pytest
import torch
from headroom import StateFileError, load_state, save_state
from headroom._core import atomic
from headroom.state.file import layout
from headroom.state.file.layout import PIECE

from helpers import state_file_faults as faults
from helpers.bits import assert_same_bits


@pytest.mark.slow
def test_a_kill_at_any_call_leaves_a_whole_file(memory_path):
    line = [sys.executable, faults.__file__, str(memory_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, limits = map(int, done.stdout.split())
    assert kills >= 50 and limits >= 9


ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE)


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_an_error_of_any_call_leaves_the_old_file_and_says_what_to_do(number, memory_path):
    faults.save(memory_path, 1.0)
    names = faults.count_calls(memory_path)
    assert {"open", "flock", "pwrite", "fsync", "replace", "close"} <= set(names)
    renamed = names.index("replace")
    for at, name in enumerate(names):
        for forever in (False, True):
            try:
                with faults.Shim(at, number, forever):
                    faults.save(memory_path, 2.0)
                assert name == "close" and at > renamed
            except OSError as error:
                assert error.errno == number and faults.FILE in str(error)
                wanted = "save again" if at > renamed else atomic.ADVICE.get(number, "elsewhere")
                assert wanted in str(error) and os.strerror(number) in str(error)
                left = [file.stat().st_size for file in memory_path.glob(".*")]
                assert forever or not any(left)
            assert faults.loaded(memory_path) == (2.0 if at > renamed else 1.0)
            faults.save(memory_path, 1.0)


def test_short_writes_are_completed(memory_path):
    names = faults.count_calls(memory_path)
    for at, name in enumerate(names):
        if name == "pwrite":
            with faults.Shim(at, "short"):
                faults.save(memory_path, 2.0)
            assert faults.loaded(memory_path) == 2.0


def test_a_file_system_without_locks(memory_path):
    at = faults.count_calls(memory_path).index("flock")
    with faults.Shim(at, errno.ENOLCK):
        faults.save(memory_path, 2.0)
    assert faults.loaded(memory_path) == 2.0


def test_a_folder_that_is_none_or_not_writable(tmp_path):
    with pytest.raises(NotADirectoryError, match="not exist; save in a folder"):
        (tmp_path / "file").touch()
        faults.save(tmp_path / "file" / "folder", 1.0)
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    faults.save(tmp_path, 1.0)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="is as it was; save in a folder that you may"):
            faults.save(tmp_path, 2.0)
        assert faults.loaded(tmp_path) == 1.0
    finally:
        tmp_path.chmod(0o700)


def test_two_writers(tmp_path):
    faults.save(tmp_path, 1.0)
    partial = tmp_path / atomic.partial_of(faults.FILE)
    with open(partial, "wb") as file:
        file.write(b"what a killed process left" * 1000)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StateFileError, match="being written by another.*rank 0"):
            faults.save(tmp_path, 2.0)
        assert faults.loaded(tmp_path) == 1.0 and partial.stat().st_size
    faults.save(tmp_path, 3.0)
    assert faults.loaded(tmp_path) == 3.0 and not partial.exists()


def test_many_writers_at_once(memory_path):
    faults.save(memory_path, 0.0)
    done, refused = [], []

    def write(value):
        for _ in range(30):
            try:
                faults.save(memory_path, value)
                done.append(value)
            except StateFileError:
                refused.append(value)

    threads = [threading.Thread(target=write, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        faults.loaded(memory_path)
    assert done and len(done) + len(refused) == 120
    assert os.listdir(memory_path) == [faults.FILE]


def test_a_link_goes_on_pointing_to_the_file(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / faults.FILE).symlink_to(tmp_path / "real" / "state")
    faults.save(tmp_path, 1.0)
    assert (tmp_path / faults.FILE).is_symlink() and faults.loaded(tmp_path) == 1.0
    assert os.listdir(tmp_path / "real") == ["state"]


def test_a_save_at_the_end_of_the_process(path, monkeypatch):
    """Then no threads can be had."""
    extra = torch.randn(PIECE // 4)
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    save_state(path, extra=extra)
    monkeypatch.undo()
    assert_same_bits([load_state(path)], [extra])


def test_either_library_sums_alike(path, monkeypatch):
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    extra = torch.randn(PIECE // 3)
    for writer, reader in ((zlib, isal_zlib), (isal_zlib, zlib)):
        monkeypatch.setattr(layout, "crc32", writer.crc32)
        save_state(path, extra=extra)
        monkeypatch.setattr(layout, "crc32", reader.crc32)
        assert_same_bits([load_state(path)], [extra])
