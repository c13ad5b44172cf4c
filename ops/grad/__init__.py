"""Gradients: clipping, their norm, and their sum over micro-batches."""
