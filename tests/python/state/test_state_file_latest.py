"""The newest of several state files, and the removal of older ones."""

import errno
import os
import warnings

import headroom
import pytest
import torch
from headroom import StateFileError, load_state, save_state
from headroom._core import atomic
from headroom.state import save
from headroom.state.file import StateFile
from headroom.state.file.layout import PIECE

from helpers.state_runs import OPTIMIZERS, signed, state_of


def test_keep_and_latest(tmp_path):
    assert headroom.latest(tmp_path) is None
    others = ["step-x.safetensors", "step-7.txt", "notes-1.safetensors"]
    for name in others:
        (tmp_path / name).write_text("not a state")
    save_state(tmp_path / "best-1.safetensors", extra="best", rng=False)
    (tmp_path / atomic.partial_of("step-0.safetensors")).write_text("left by a kill")
    for i in range(8, 12):
        path = tmp_path / f"step-{i}.safetensors"
        save_state(path, extra=i, keep=3, rng=False)
        assert headroom.latest(tmp_path) == path
    kept = {f"step-{i}.safetensors" for i in (9, 10, 11)}
    assert set(os.listdir(tmp_path)) == kept | {*others, "best-1.safetensors"}

    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-1])
    with pytest.warns(UserWarning, match="passed over.*step-11.*malformed|cut off|damaged"):
        assert headroom.latest(tmp_path) == tmp_path / "step-10.safetensors"
    # A run that starts again keeps what it has written, whatever the numbers.
    save_state(tmp_path / "step-1.safetensors", extra=1, keep=1, rng=False)
    left = {name for name in os.listdir(tmp_path) if name.startswith("step-1")}
    assert left == {"step-1.safetensors", "step-11.safetensors"}  # the damaged one is left alone


def test_latest_looks_at_everything(tmp_path):
    for i in (1, 2):
        save_state(tmp_path / f"{i}", extra=torch.randn(100), rng=False)
    data = bytearray((tmp_path / "2").read_bytes())
    data[-1] ^= 1
    (tmp_path / "2").write_bytes(data)
    with pytest.warns(UserWarning, match="'extra' is damaged"):
        assert headroom.latest(tmp_path) == tmp_path / "1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert headroom.latest(tmp_path, verify=False) == tmp_path / "2"


def test_the_order_is_that_of_saving_whatever_the_clock_and_the_names_say(tmp_path, monkeypatch):
    """The clock is set back, and then stands still; a lower step is saved later; files are touched
    and renamed."""
    times = iter([9000, 8000, 7000, 10, 10, 10])
    monkeypatch.setattr(save.time, "time_ns", lambda: next(times))
    for number in (8, 9, 10, 3, 4):
        path = tmp_path / f"step-{number}.safetensors"
        save_state(path, extra=number, rng=False, keep=3)
        assert headroom.latest(tmp_path) == path
    assert set(os.listdir(tmp_path)) == {f"step-{n}.safetensors" for n in (10, 3, 4)}
    os.utime(tmp_path / "step-10.safetensors")
    path = path.rename(tmp_path / "step-0.safetensors")
    assert headroom.latest(tmp_path) == path
    save_state(tmp_path / "another.safetensors", extra=1, rng=False)
    assert headroom.latest(tmp_path) == tmp_path / "another.safetensors"


def test_files_without_a_number_count_as_older_and_go_by_their_times(tmp_path):
    """Those of format 1."""
    for i, name in enumerate(OPTIMIZERS):
        data = state_of(name, 1).read_bytes()
        (tmp_path / f"{9 - i}").write_bytes(data)
    times = {}
    for path in tmp_path.iterdir():
        with StateFile(path) as file:
            assert file.sequence == 0
            times[file.document["saved_ns"]] = path
    assert len(times) == 4 and headroom.latest(tmp_path) == times[max(times)]
    save_state(tmp_path / "0", extra=0)
    assert headroom.latest(tmp_path) == tmp_path / "0"


def test_the_highest_number_there_is(tmp_path):
    save_state(tmp_path / "1", extra=1)
    data = (tmp_path / "1").read_bytes()
    data = data.replace(b'"sequence":"0000000000000001"', b'"sequence":"9999999999999999"')
    (tmp_path / "1").write_bytes(data)
    signed(tmp_path / "1", lambda header, document: None)
    save_state(tmp_path / "2", extra=2)
    assert headroom.latest(tmp_path) == tmp_path / "2"


def test_latest_of_a_folder_that_is_missing(tmp_path):
    assert headroom.latest(tmp_path / "none") is None
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        headroom.latest(tmp_path / "file")


def test_latest_does_not_say_that_there_is_none_where_files_cannot_be_read(tmp_path, monkeypatch):
    """A run would begin anew beside its states."""
    save_state(tmp_path / "1.safetensors", extra=1)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")  # cannot be read, not even by root
    with pytest.warns(UserWarning, match="passed over.*symbolic links.*loop"):
        assert headroom.latest(tmp_path) == tmp_path / "1.safetensors"
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(OSError, match="1 file in .*symbolic links") as error:
        headroom.latest(tmp_path)
    assert error.value.errno == errno.ELOOP
    (tmp_path / "loop").unlink()
    assert headroom.latest(tmp_path) is None

    save_state(tmp_path / "1.safetensors", extra=torch.ones(9))
    for at, number in (("open", errno.EACCES), ("preadv", errno.EIO)):
        real = getattr(os, at)

        def failing(file, *args, at=at, real=real, number=number):
            if at == "preadv" or ".safetensors" in str(file):
                raise OSError(number, os.strerror(number), str(file))
            return real(file, *args)

        with monkeypatch.context() as patch:
            patch.setattr(os, at, failing)
            with pytest.raises(OSError, match=os.strerror(number)):
                headroom.latest(tmp_path)
    assert headroom.latest(tmp_path) == tmp_path / "1.safetensors"


def test_latest_does_not_say_that_there_is_none_where_all_are_damaged(tmp_path):
    for i in range(2):
        save_state(tmp_path / f"{i}.safetensors", extra=torch.ones(9))
        os.truncate(tmp_path / f"{i}.safetensors", 900)
    with pytest.raises(StateFileError, match="2 files in .*none that is a whole state.*cut off"):
        headroom.latest(tmp_path)


def test_the_folder_is_made(tmp_path, monkeypatch):
    """And its name is on the disk before the file's."""
    synced = []
    real = atomic._sync_folder
    monkeypatch.setattr(atomic, "_sync_folder", lambda f: (synced.append(f), real(f)))
    path = tmp_path / "a" / "b" / "1.safetensors"
    save_state(path, extra=1)
    assert load_state(path) == 1
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


def test_what_is_written_is_synced_before_it_is_renamed_and_its_folder_after(path, monkeypatch):
    calls, real = [], {name: getattr(os, name) for name in ("pwrite", "fsync", "replace")}

    def recorded(name):
        def call(file, *args):
            target = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file
            calls.append((name, os.path.basename(target)))
            return real[name](file, *args)

        return call

    for name in real:
        monkeypatch.setattr(os, name, recorded(name))
    save_state(path, extra=[torch.ones(5), torch.ones(PIECE // 2)])
    partial = atomic.partial_of(path.name)
    end = [("fsync", partial), ("replace", partial), ("fsync", path.parent.name)]
    assert calls[-3:] == end and set(calls[:-3]) == {("pwrite", partial)}
    assert load_state(path)[0].tolist() == [1] * 5


def test_keep_leaves_other_runs_alone(tmp_path):
    """Of several numbers in a name the last counts."""
    for seed in (0, 1, 10):
        for step in (100, 200, 300):
            path = tmp_path / f"seed{seed}-step{step}.v"
            save_state(path, extra=step, rng=False, keep=2)
    want = {f"seed{seed}-step{step}.v" for seed in (0, 1, 10) for step in (200, 300)}
    assert set(os.listdir(tmp_path)) == want
    (tmp_path / "newest").symlink_to("run7")  # whose own name the file gets
    save_state(tmp_path / "newest", extra=1, rng=False)
    with pytest.raises(ValueError, match="keep=2 needs a number"):
        save_state(tmp_path / "newest", extra=1, rng=False, keep=2)
