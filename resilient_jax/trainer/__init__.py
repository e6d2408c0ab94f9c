"""The trainer: the user's model, loss and optimizer in the loop that survives failures."""
