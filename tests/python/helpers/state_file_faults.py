"""Faults for every system call of a save: errors in the process that asks, kills in children.

    python tests/python/helpers/state_file_faults.py FOLDER

saves in children that are killed, or limited in the size of files, at every call, and prints how
many of them there were.
"""

import errno
import fcntl
import os
import resource
import signal
import sys
from pathlib import Path

import headroom
import torch
from headroom._core import atomic
from headroom.state.file import reading, writing

CALLS = (
    *("open", "close", "stat", "fstat", "fchmod", "mkdir"),
    *("pwrite", "fsync", "replace", "unlink"),
)
FILE = "step-2.safetensors"
MODULES = atomic, reading, writing  # which call the system


class Shim:
    """Stands for the modules `os` and `fcntl` in MODULES, and counts their calls.

    The call `at` does what `fault` says: an errno is raised, "kill" kills before the call, "killed"
    after it, "half" in the middle of a write, and "short" writes half of it. With `forever`, an
    error is raised by all later calls that need the disk, too.
    """

    def __init__(self, at=None, fault=None, forever=False):
        self.at, self.fault, self.forever = at, fault, forever
        self.count, self.names = 0, []

    def __getattr__(self, name):
        if name not in (*CALLS, "flock"):
            return getattr(fcntl if name.startswith("LOCK") else os, name)
        real = getattr(fcntl if name == "flock" else os, name)

        def call(*args, **kwargs):
            here = self.count
            self.count += 1
            self.names.append(name)
            hit = here == self.at or (self.forever and here > (self.at or 0) and name != "close")
            if not hit:
                return real(*args, **kwargs)
            if isinstance(self.fault, int):
                if name == "close":
                    real(*args)
                raise OSError(self.fault, os.strerror(self.fault))
            if name == "pwrite" and self.fault in ("half", "short"):
                file, data, offset = args
                count = real(file, data[: max(1, len(data) // 2)], offset)
                if self.fault == "short":
                    return count
            if self.fault == "killed":
                real(*args, **kwargs)
            if self.fault != "short":
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    def __enter__(self):
        for module in MODULES:
            module.os = self
        atomic.fcntl = self
        return self

    def __exit__(self, *_):
        for module in MODULES:
            module.os = os
        atomic.fcntl = fcntl


def model_of(value):
    """A model with eight tensors full of a number."""
    model = torch.nn.Sequential(*[torch.nn.Linear(3 + i, 2) for i in range(4)])
    for param in model.parameters():
        param.data.fill_(value)
    return model


def save(folder, value, name=FILE, **options):
    options = {"rng": False, "progress": False, **options}
    headroom.save_state(Path(folder) / name, model=model_of(value), extra=value, **options)


def loaded(folder):
    """The number of the state in the folder, once all of it has been looked at."""
    model = model_of(-1.0)
    value = headroom.load_state(Path(folder) / FILE, model=model, progress=False)
    assert all((param == value).all() for param in model.parameters())
    return value


def count_calls(folder, **options):
    """The calls of a save over a file."""
    save(folder, 1.0, **options)
    with Shim() as shim:
        save(folder, 1.0, **options)
    return shim.names


def in_child(action):
    """The signal that ends a child which does `action`, or 0."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        except OSError as error:
            status = 2 if error.errno == errno.EFBIG else 3
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 2, -signal.SIGKILL), status
    return status


def killed(folder, at, fault, **options):
    def action():
        with Shim(at, fault):
            save(folder, 2.0, **options)

    status = in_child(action)
    assert status == -signal.SIGKILL, (at, fault)
    value = loaded(folder)
    assert value in (1.0, 2.0)
    save(folder, 1.0)  # over what is left of the other
    assert loaded(folder) == 1.0
    return value


def limited(folder, size):
    def action():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        save(folder, 2.0)

    assert in_child(action) == 2
    assert loaded(folder) == 1.0


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    kills = []
    plain = count_calls(folder)
    for at, name in enumerate(plain):
        for fault in ("kill", "killed", *(["half"] if name == "pwrite" else [])):
            kills.append((name, fault, killed(folder, at, fault)))
    save(folder, 1.0, name="step-1.safetensors")
    rotating = count_calls(folder, keep=2)
    for at in range(len(plain), len(rotating)):
        kills.append((rotating[at], "kill", killed(folder, at, "kill", keep=2)))
    # The new file is there from the moment of the renaming on, and not before.
    assert {v for name, fault, v in kills if name == "pwrite"} == {1.0}
    assert {v for name, fault, v in kills if name == "replace"} == {1.0, 2.0}
    size = (folder / FILE).stat().st_size
    limits = range(0, size, 197)
    for limit in limits:
        limited(folder, limit)
    print(len(kills), len(limits))


if __name__ == "__main__":
    main()
