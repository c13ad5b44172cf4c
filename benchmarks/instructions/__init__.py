"""Instructions per element in the device code: `python -m benchmarks.instructions`."""
