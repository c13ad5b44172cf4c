"""Where a state file is written: at paths that are no files, over files of others, behind links."""

import os
import socket
import stat

import pytest
import torch
from headroom import load_state, save_state
from headroom.__main__ import main
from headroom._core import atomic

from helpers.small_runs import trained


def fifo(path):
    os.mkfifo(path)


def device(path):
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device needs root")


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def save(path):
    save_state(path, extra=1)


def convert(path):
    """The other command that writes a file at a place that it is given."""
    source = path.parent / "source.pt"
    _, optimizer = trained()
    torch.save(optimizer.state_dict(), source)
    try:
        if main(["convert", str(source), str(path), "--to", "torch"]):
            raise OSError("see above")
    finally:
        source.unlink()


@pytest.mark.parametrize("write", [save, convert])
@pytest.mark.parametrize("make", [fifo, device, unix_socket, os.mkdir])
def test_what_is_no_file_is_not_replaced(make, write, tmp_path):
    path = tmp_path / "x"
    make(path)
    before = os.lstat(path)
    with pytest.raises(OSError):
        write(path)
    assert os.path.samestat(before, os.lstat(path)) and os.listdir(tmp_path) == ["x"]
    if write is save and make is not os.mkdir:
        with pytest.raises(FileExistsError, match="a save replaces files only.*is as it was"):
            save(path)


@pytest.mark.parametrize("write", [save, convert])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o400])
def test_a_file_that_is_replaced_keeps_its_permissions(mode, write, path):
    write(path)
    umask = os.umask(0o022)
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
        path.chmod(mode)
        write(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(umask)


def test_a_file_that_is_replaced_keeps_its_owner(path):
    if os.geteuid():
        pytest.skip("giving files away needs root")
    save(path)
    os.chown(path, 1234, 1235)
    save(path)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)


@pytest.mark.parametrize("link", ["symbolic", "dangling", "hard", "open file", "pipe"])
def test_what_lies_at_the_partial_path_is_not_written_to(link, path):
    other = path.with_name("precious")
    other.write_text("precious")
    partial = path.with_name(atomic.partial_of(path.name))
    if link == "symbolic":
        partial.symlink_to(other)
    elif link == "dangling":
        partial.symlink_to("not yet")
    elif link == "hard":
        os.link(other, partial)
    elif link == "pipe":
        os.mkfifo(partial)
    else:
        partial.touch()
    with open(other if link != "open file" else partial, "rb") as file:
        if link in ("hard", "open file"):  # names that may be taken away, but no more
            save(path)
            assert load_state(path) == 1 and not partial.exists()
        else:
            with pytest.raises(FileExistsError, match="partial must be a file.*does not exist"):
                save(path)
            assert os.path.lexists(partial) and not path.exists()
        assert file.read() in (b"precious", b"")
    assert other.read_text() == "precious" and not path.with_name("not yet").exists()
