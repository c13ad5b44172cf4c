"""Objects and states through a file or a pickle and back."""

import io
import pickle

import torch


def through_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


def through_save(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
