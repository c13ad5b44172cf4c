"""Bytes that autograd keeps for the backward pass."""

from torch.autograd.graph import saved_tensors_hooks


def kept_bytes(run, spared=()):
    """Of memory that is saved while ``run`` runs, without that of ``spared``."""
    seen = {}

    def pack(x):
        storage = x.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes(), x  # keeps the memory from being used again
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        result = run()
    for x in spared:
        seen.pop(x.untyped_storage().data_ptr(), None)
    del result
    return sum(size for size, _ in seen.values())
