"""The same values at other places in memory: strides, and distances to the start of a storage."""

import torch


def contiguous(tensor):
    """A copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


def transposed(tensor):
    """The same values, with the dimensions in reverse order in memory."""
    axes = list(reversed(range(tensor.dim())))
    return tensor.permute(axes).contiguous().permute(axes)


def channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last)


def sliced(tensor, fill=7.0):
    """Every second column of a larger tensor, whose other columns hold `fill`."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), fill).to(tensor)
    view = wide[..., 1::2]
    view.copy_(tensor)
    return view


def offset(tensor, fill=7.0):
    """Contiguous, but starting at element 3 of its storage."""
    return torch.cat([tensor.new_full((3,), fill), tensor.reshape(-1)])[3:].view(tensor.shape)


LAYOUTS = {layout.__name__: layout for layout in (contiguous, channels_last, transposed, sliced)}


def rest_of_storage(tensor):
    """The elements of the storage that the tensor does not show."""
    storage = tensor.new_empty(0).set_(tensor.untyped_storage())
    shown = torch.zeros(storage.numel(), dtype=torch.bool, device=tensor.device)
    shown.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return storage[~shown]
