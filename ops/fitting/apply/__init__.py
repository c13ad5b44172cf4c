"""Makes of a model what was chosen, trains it so, and gives it back."""
