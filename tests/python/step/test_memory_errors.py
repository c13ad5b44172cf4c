"""Errors of memory: which they are, what they keep alive, and what is added to them."""

import gc
import weakref

import pytest
import torch
from headroom.step.out_of_memory import add_note, forget_tensors, is_out_of_memory


def test_what_an_error_keeps_alive_is_freed():
    def fails(number):
        x = torch.ones(3)
        kept.append(weakref.ref(x))
        cycle = [x]
        cycle.append(cycle)
        if number == 0:
            raise MemoryError("the first")
        try:
            fails(number - 1)
        except MemoryError as error:
            if number == 1:
                raise RuntimeError("because of it") from error
            raise

    kept = []
    gc.disable()
    try:
        with pytest.raises(RuntimeError) as caught:
            fails(3)
        error = caught.value
        assert error.__cause__ is not None and any(one() is not None for one in kept)
        error.__cause__.__context__ = error  # round and round
        forget_tensors(error)
        assert len(kept) == 4 and all(one() is None for one in kept)
    finally:
        gc.enable()
    assert error.__traceback__ is not None


def test_devices_with_memory_are_waited_for_before_it_is_given_back(monkeypatch):
    done = []
    for name, fake in (
        ("is_initialized", lambda: True),
        ("device_count", lambda: 3),
        ("memory_reserved", lambda device: device % 2),
        ("synchronize", done.append),
        ("empty_cache", lambda: done.append("given back")),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    forget_tensors(MemoryError())
    assert done == [1, "given back"]


def test_text_is_added_to_an_error():
    class Old(Exception):  # without notes, as before Python 3.11
        add_note = property()

    error = MemoryError("no room")
    add_note(error, "so it is")
    assert error.__notes__ == ["so it is"]
    for args in ((), ("no room", 7)):
        old = Old(*args)
        add_note(old, "so it is")
        assert old.args == ("no room\nso it is", 7)[:2] if args else ("\nso it is",)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_errors_that_say_nothing_of_memory(kind):
    assert not is_out_of_memory(kind("shapes do not fit"))
    said = kind("CUDA error: out of memory")
    assert is_out_of_memory(said) == (kind is RuntimeError)
    assert is_out_of_memory(kind("DefaultCPUAllocator: not enough memory")) == (
        kind is RuntimeError
    )
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("x"))
