"""The planner: what a program costs under a sharding plan, which plan is fastest on given devices, and replanning.

Imports neither jax nor numpy. The README in this folder has the data flow.
"""
