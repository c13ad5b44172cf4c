"""What a training step is: what its trees hold, what runs in it, what it keeps."""
