"""Agents and their leader: how the generations of a job are decided on, published and carried out."""
