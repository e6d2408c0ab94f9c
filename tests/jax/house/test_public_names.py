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
        "MicrobatchData",
        "NextPlan",
        "NoFeasiblePlan",
        "NonFiniteError",
        "Numerics",
        "OperatorError",
        "PackedDocuments",
        "Parallelism",
        "Pipeline",
        "Plan",
        "PlanError",
        "Planner",
        "Prefetcher",
        "ProgramCost",
        "RaveledArray",
        "ReadOptions",
        "RecoveryAction",
        "RecoveryDecision",
        "RecoveryOption",
        "ReplanDecision",
        "ReplanStep",
        "ReplicaShape",
        "ResilientJaxError",
        "ShardedState",
        "StateError",
        "StepReport",
        "Topology",
        "TopologyError",
        "Trainer",
        "TrainerStep",
        "TransformerShape",
        "WeightedMean",
        "World",
        "analyze_program",
        "analyze_transformer",
        "compile_plan",
        "digest_tree",
        "load_model_shape",
        "load_topology",
        "make_mesh",
        "make_microbatch_data",
        "make_state_shardings",
        "replan",
        "run",
        "search_plan",
    ),
    "resilient_jax.config": ("JobConfig", "decode_toml", "load_toml", "override_values"),
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


def test_dir_lists_the_public_names():
    assert sorted(dir(importlib.import_module("resilient_jax"))) == list(PUBLIC["resilient_jax"])


def test_a_name_that_is_not_public_is_an_attribute_error_that_lists_those_that_are():
    root = importlib.import_module("resilient_jax")
    with pytest.raises(AttributeError, match=r"no attribute 'runn'; it has .*run"):
        _ = root.runn
