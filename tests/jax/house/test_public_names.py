"""The public names, pinned: one more or one less is a decision, not an accident."""

import importlib

import pytest

PUBLIC = {
    "resilient_jax": (
        "AccumulationOptions",
        "Callback",
        "CallerError",
        "Checkpoints",
        "DataError",
        "EarlyStopping",
        "Evaluation",
        "FitResult",
        "JobConfig",
        "LogicalAxisRules",
        "Microbatch",
        "NonFiniteError",
        "Numerics",
        "OperatorError",
        "Parallelism",
        "Pipeline",
        "Planner",
        "RaveledArray",
        "ReadOptions",
        "ReplicaShape",
        "ResilientJaxError",
        "ShardedState",
        "StateError",
        "StepReport",
        "Trainer",
        "TrainerStep",
        "WeightedMean",
        "World",
        "data",
        "digest_tree",
        "planning",
        "run",
    ),
    "resilient_jax.config": ("JobConfig", "decode_toml", "load_toml", "override_values"),
    "resilient_jax.data": (
        "MicrobatchData",
        "PackedDocuments",
        "Prefetcher",
        "make_microbatch_data",
    ),
    "resilient_jax.planning": (
        "NextPlan",
        "NoFeasiblePlan",
        "Plan",
        "PlanError",
        "ProgramCost",
        "RecoveryAction",
        "RecoveryDecision",
        "RecoveryOption",
        "ReplanDecision",
        "ReplanStep",
        "Topology",
        "TopologyError",
        "TransformerShape",
        "analyze_program",
        "analyze_transformer",
        "compile_plan",
        "load_model_shape",
        "load_topology",
        "make_mesh",
        "make_state_shardings",
        "replan",
        "search_plan",
    ),
    "resilient_jax.topology": (
        "Accelerator",
        "DomainHosts",
        "FailureDomain",
        "HOST_LEVEL",
        "Host",
        "HostClass",
        "HostName",
        "LinkLevel",
        "NumberFormat",
        "Peak",
        "Port",
        "Topology",
        "TopologyError",
        "UnknownHost",
        "decode_topology",
        "load_topology",
    ),
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these(module):
    assert tuple(sorted(importlib.import_module(module).__all__)) == PUBLIC[module]


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_resolves(module):
    home = importlib.import_module(module)
    missing = [name for name in PUBLIC[module] if not hasattr(home, name)]
    assert missing == []


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_says_what_it_gives(module):
    home = importlib.import_module(module)
    silent = [name for name in PUBLIC[module] if not (getattr(home, name).__doc__ or "").strip()]
    assert silent == []


@pytest.mark.parametrize("module", ["resilient_jax", "resilient_jax.data", "resilient_jax.planning"])
def test_dir_lists_the_public_names(module):
    assert sorted(dir(importlib.import_module(module))) == list(PUBLIC[module])


def test_a_name_that_is_not_public_is_an_attribute_error_that_lists_those_that_are():
    root = importlib.import_module("resilient_jax")
    with pytest.raises(AttributeError, match=r"no attribute 'runn'; it has .*run"):
        _ = root.runn
