"""Clips gradients, measures their norm, and sums them over micro-batches."""
