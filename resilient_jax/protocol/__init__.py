"""What processes say to each other, as frozen values: store records and agent-worker messages."""
