"""The training data as a pure function of (step, index), the same on every host."""
