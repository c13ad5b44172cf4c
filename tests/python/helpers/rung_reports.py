"""Results of the demo's rungs, as its runs write them."""

from dataclasses import asdict

import headroom

from rungs import RUNGS


def report(title, loss, tolerance=0.01, **others):
    kinds = ("parameters", "optimizer_state", "gradients", "activations")
    return asdict(RUNGS.get(title, RUNGS["torch"])) | {
        "title": title,
        "size": "tiny",
        "vocab": 256,
        "losses": [8.0, 7.0],
        "gradients_of_L0": None,
        "fit": None,
        "step_seconds": 0.1,
        "held_out_bits_per_byte": loss,
        "tolerance": tolerance,
        "tokens_per_second": 1234.5,
        "peak_bytes": 10 << 20,
        "predicted_peak_bytes": 10 << 20,
        "host_bytes": 0,
        "predicted_host_bytes": 0,
        "process_peak_bytes": 12 << 20,
        "bytes": dict.fromkeys(headroom.memory.KINDS, 0)
        | {kind: (i + 1) << 20 for i, kind in enumerate(kinds)},
        "bytes_per_parameter": 16.04,
        "model_parameters": 1000,
        "batch": 4,
        "context": 32,
        "steps": 2,
        "device": "cpu",
        "seconds": 3.2,
        **others,
    }
