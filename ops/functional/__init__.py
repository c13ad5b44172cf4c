"""The ops of Headroom as functions on lists of tensors."""
