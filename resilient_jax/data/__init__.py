"""The training data as a pure function: microbatch `index` of step `step`, whoever computes it."""
