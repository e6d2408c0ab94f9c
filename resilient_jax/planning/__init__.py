"""The planner: what a program costs under a sharding plan, which plan is fastest on given devices, and replanning.

Imports numpy, not JAX. The README in this folder has the data flow.
"""
