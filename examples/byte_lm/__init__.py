"""A small language model over bytes: its settings, text, network and loss."""
