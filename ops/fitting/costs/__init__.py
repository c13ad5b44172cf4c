"""The costs of a step: the bytes and the seconds of its blocks, of the rest of it, and of its
optimizer."""
