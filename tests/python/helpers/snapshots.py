"""Snapshots as torch's CUDA allocator writes them, made by hand: see the schema in
``torch/csrc/cuda/memory_snapshot.cpp``."""

__all__ = ["OPTIMIZER", "TORCH", "USER", "cuda_snapshot", "entry"]

USER = {"name": "forward", "filename": "/home/me/run/model.py", "line": 12}
TORCH = {"name": "linear", "filename": "/v/lib/site-packages/torch/nn/functional.py", "line": 9}
OPTIMIZER = {"name": "wrapper", "filename": "/v/site-packages/torch/optim/optimizer.py", "line": 5}


def entry(action, address, size, *frames, **more):
    """An entry of a trace."""
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 1,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": list(frames),
    } | more


def cuda_snapshot():
    """A snapshot with one segment, two marks, and memory that was there before its trace."""
    trace = [
        entry("segment_alloc", 1000, 2 << 20, time_us=100),
        entry("alloc", 1000, 300, TORCH, USER, time_us=101),  # with what follows: live 300
        entry("annotate", 77, 1, user_metadata="headroom::mark:0"),
        entry("alloc", 1512, 200, USER, time_us=102, user_metadata="mine"),  # 500
        entry("free_requested", 1000, 300),
        entry("free_completed", 1000, 300, time_us=103),  # 200
        entry("alloc", 1000, 100, OPTIMIZER, USER, time_us=104),  # 300, where something was
        entry("annotate", 77, 1, user_metadata="headroom::mark:1"),
        entry("free_requested", 5000, 64),
        entry("free_completed", 5000, 64, time_us=105),  # made before the trace
        {"action": "oom", "size": 1 << 30, "device_free": 512, "stream": 0, "time_us": 106},
        entry("snapshot", 0, 0),
    ]
    blocks = [
        _block(1000, 512, 100, "active_allocated", USER),
        _block(1512, 512, 200, "active_allocated", USER),
        _block(2024, 1024, 700, "active_pending_free"),
        _block(3048, (2 << 20) - 2048, 0, "inactive"),
    ]
    segment = {
        "device": 0,
        "address": 1000,
        "total_size": 2 << 20,
        "allocated_size": 1024,
        "active_size": 2048,
        "requested_size": 1000,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    return {
        "segments": [segment],
        "device_traces": [trace, []],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [],
    }


def _block(address, size, requested, state, *frames):
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": list(frames),
    }
