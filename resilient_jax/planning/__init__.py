"""The planner: what a program costs under a sharding plan, which plan is fastest on given devices, and replanning.

Imports numpy, not JAX. The README in this folder has the data flow. Type checkers read `__init__.pyi`, because this
file imports nothing from the higher rooms whose names it offers.
"""

from resilient_jax.lazy_names import make_lazy_names

_HOME = {
    "NextPlan": "resilient_jax.planning.next_plans",
    "NoFeasiblePlan": "resilient_jax.planning.errors",
    "Plan": "resilient_jax.planning.plan",
    "PlanError": "resilient_jax.planning.errors",
    "ProgramCost": "resilient_jax.planning.program_cost",
    "RecoveryAction": "resilient_jax.protocol.recovery_records",
    "RecoveryDecision": "resilient_jax.protocol.recovery_records",
    "RecoveryOption": "resilient_jax.protocol.recovery_records",
    "ReplanDecision": "resilient_jax.planning.replan_decision",
    "ReplanStep": "resilient_jax.planning.replan_decision",
    "Topology": "resilient_jax.topology.topology",
    "TopologyError": "resilient_jax.topology.errors",
    "TransformerShape": "resilient_jax.planning.transformer",
    "analyze_program": "resilient_jax.program_analysis.program_analysis",
    "analyze_transformer": "resilient_jax.planning.transformer_cost",
    "compile_plan": "resilient_jax.sharding.planned_program",
    "load_model_shape": "resilient_jax.planning.model_file",
    "load_topology": "resilient_jax.topology.file_loader",
    "make_mesh": "resilient_jax.sharding.planned_program",
    "make_state_shardings": "resilient_jax.sharding.planned_program",
    "replan": "resilient_jax.planning.replanning",
    "search_plan": "resilient_jax.planning.search",
}

__getattr__, __dir__, __all__ = make_lazy_names(__name__, _HOME)
