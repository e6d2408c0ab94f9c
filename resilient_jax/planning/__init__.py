"""The planner: what a program costs under a sharding plan, which plan is fastest on given devices, and replanning.

Imports numpy, not JAX. The README in this folder has the data flow. Type checkers read `__init__.pyi`, because this
file imports nothing from the higher rooms whose names it offers.
"""

from resilient_jax.lazy_names import make_lazy_names

__getattr__, __dir__, __all__ = make_lazy_names(__name__)
