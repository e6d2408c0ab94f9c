"""Agents, leader and membership: which hosts take part in a generation, and how it is formed."""
