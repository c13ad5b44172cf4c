"""Where the time of training steps goes: ``torch.profiler`` with our ranges, counts and tables."""
