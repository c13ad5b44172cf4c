"""What a recorded cycle amounts to, as numbers: :class:`ProfileResult`, and the file of it.

``NAME.profile.json`` beside the trace is :meth:`ProfileResult.to_dict` as JSON. All times are in
microseconds and start at the begin of the first recorded step; figures of modules and ops are sums
over the recorded steps, so divide them by ``len(steps)``. Version 1::

    format          "headroom.profile"
    version         1
    created         ISO 8601 with time zone
    headroom, torch version strings
    device          {"type": "cpu" | "cuda", "name": str}
    rank, cycle     which process wrote it, and which cycle of the schedule it is, both from 0
    trace           name of the trace file beside this one, or null
    complete        false if the with block ended while the cycle was being recorded
    ended_by        name of the exception that ended it, or null
    settings        {"record_shapes", "profile_memory", "with_stack", "nvtx": bool}
    steps           [{"number": of the step, "start_us", "wall_us": float,
                      "complete": whether prof.step() ended it,
                      "phases_us": {"data", "forward", "backward", "optimizer", "other": float},
                      "loader_us": within torch's DataLoader, "recompute_us": float,
                      "device_us": kernels, float or null,
                      "model_flops", "recomputed_flops": int}]
                    the phases of a step add up to its wall_us
    totals          {"steps": int, "wall_us", "phases_us", "loader_us", "recompute_us", "device_us",
                     "model_flops", "recomputed_flops": sums over the steps,
                     "flops_by_dtype": {"float32": both kinds of FLOPs, int},
                     "mfu", "hfu": fraction of the peak rate, float or null}
                    hfu counts recomputed FLOPs too
    peak_rate       {"source": "given" | "measured" | "published" | "unknown", "about": str,
                     "by_dtype": {"float32": FLOP/s}}
    modules         [{"name": "" for the model, else as in named_modules(), "type": its class,
                      "calls": in forward passes, "recomputed_calls": int,
                      "self": figures without, "total": figures with the modules inside it,
                      "parameter_bytes", "optimizer_bytes": of its own parameters and those inside,
                      "peak_bytes": most live at once while it ran, or null}]
                    in the order of the model; modules that did not run and hold none that did
                    are left out
    figures         {"forward_us", "backward_us", "recompute_us": float, "device_us": float or null,
                     "model_flops", "recomputed_flops": int,
                     "allocated_bytes": by all three, "kept_bytes": allocated less freed in the
                     forward pass: int or null}
    outside         figures of what belongs to no module: the loss, sums of gradients, the engine
                    of autograd; not the optimizer and the data
    ops             [{"name", "calls": int, "total_us", "self_us": float, "device_us": or null,
                      "model_flops", "recomputed_flops": int,
                      "bytes": int or null, "bytes_are": "counted" | "estimate" | null,
                      "bytes_per_s": bytes over the time of the calls, float or null}]
                    by self_us, the largest first
    memory          {"cpu" | "cuda:0": {"peak_bytes": int, "points": [[us, live bytes], ...]}}
                    above what was live when the recording started; at most 2,000 points, each
                    the largest of its interval
    notes           [sentences about what could not be seen]

Numbers that are null were not recorded.
"""
