"""A small language model over bytes: its settings, text, network and the pure parts of its step."""
