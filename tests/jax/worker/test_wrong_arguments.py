"""A wrong argument is refused where it is given, with its name, what was found, what was expected and a remedy."""

import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import resilient_jax as rj
from resilient_jax.argument_checks import find_refused_call
from resilient_jax.errors import CallerError

X = np.zeros((8, 3), np.float32)
EVALUATION = rj.Evaluation(data=X, interval_steps=1)


def loss_fn(model, batch):
    return jnp.mean(batch)


def make_trainer(**changes):
    right = {
        "model": lambda key: {"w": jnp.zeros(3)},
        "optimizer": optax.sgd(0.1),
        "loss_fn": loss_fn,
        "data": X,
        "batch_size": 4,
        "microbatch_size": 2,
    }
    return rj.Trainer(**{**right, **changes})


class Net(nnx.Module):
    """A module that needs more than its rngs."""

    def __init__(self, width, rngs): ...


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"parallelism": "sharded"},
            "found 'sharded' (str), expected rj.Parallelism. Write parallelism=rj.Par",
        ),
        (
            {"parallelism": rj.Parallelism},
            "parallelism: found the class Parallelism itself, expected rj.Parallelism",
        ),
        ({"parallelism": None}, "parallelism: found None (NoneType), expected rj.Parallelism"),
        (
            {"numerics": jnp.bfloat16},
            "expected rj.Numerics. Write numerics=rj.Numerics(compute_dtype=jnp.bfloat16)",
        ),
        ({"read_options": {"shuffle": False}}, "read_options: found a dict, expected rj.ReadOptions"),
        ({"planner": "meshes/mine.toml"}, "expected rj.Planner or None. Write planner=rj.Planner(topology="),
        ({"evaluation": X}, "evaluation: found a ndarray, expected rj.Evaluation or None"),
        (
            {"evaluation": EVALUATION, "early_stopping": 3},
            "early_stopping: found 3 (int), expected rj.EarlyStopping",
        ),
        (
            {"checkpoints": "dir"},
            "checkpoints: found 'dir' (str), expected rj.Checkpoints or None. Write checkpoints=",
        ),
        ({"checkpoints": Path("dir")}, "checkpoints: found a PosixPath, expected rj.Checkpoints"),
        (
            {"callbacks": print},
            "callbacks: found the function print, expected a list of functions callback(report)",
        ),
        ({"callbacks": "print"}, "callbacks: found 'print' (str), expected a list"),
        (
            {"callbacks": [print, "print"]},
            "callbacks[1]: found 'print' (str), expected a function callback(report)",
        ),
        (
            {"callbacks": [lambda step, loss: None]},
            "callbacks[0]: found a function of (step, loss), expected one",
        ),
        ({"log_directory": 3}, "log_directory: found 3 (int), expected the path of a directory, or None"),
        (
            {"model": nn.Dense},
            "model: found the class Dense itself, expected an instance of this flax.linen.Module",
        ),
        (
            {"model": Net},
            "model: found Net(width, rngs), expected a function of one argument: lambda rngs: Net(",
        ),
        (
            {"model": lambda: Net(1, nnx.Rngs(0))},
            "model: found <lambda>(), expected a function of one argument",
        ),
        ({"model": lambda rng, x: {}}, "model: found <lambda>(rng, x), expected a function of one argument"),
        ({"model": "resnet"}, "model: found 'resnet' (str), expected a function lambda rngs"),
        (
            {"optimizer": optax.adam},
            "optimizer: found the function adam, expected an optax.GradientTransformation",
        ),
        ({"optimizer": optax.adam}, "Call it, with its learning rate"),
        ({"optimizer": optax.MultiSteps}, "optimizer: found the class MultiSteps itself"),
        ({"optimizer": "adam"}, "optimizer: found 'adam' (str), expected an optax.GradientTransformation"),
        ({"data": lambda step: X}, "data: found a function of (step), expected batch(step, index)"),
        ({"data": "mnist.npz"}, "data: found 'mnist.npz', expected the data. Load what is there"),
        ({"data": None}, "data: found a NoneType, expected (1) arrays"),
        (
            {"evaluation": rj.Evaluation(data="x", interval_steps=1)},
            "evaluation: data: found 'x', expected the data",
        ),
        (
            {"evaluation": rj.Evaluation(data=[X, X], interval_steps=1)},
            "evaluation: data: found a list of 2 arrays",
        ),
        (
            {"evaluation": rj.Evaluation(data=X, interval_steps=1, use_ema=True)},
            "evaluation: found use_ema=True without an average of the parameters, expected one: Trainer(numerics=",
        ),
        (
            {"evaluation": rj.Evaluation(data=X, interval_steps=1, loss_fn=lambda model: 0.0)},
            "loss_fn: found a function of (model), expected loss_fn(model, batch)",
        ),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_the_trainer_refuses(wrong, said):
    with pytest.raises(CallerError, match=re.escape(said)):
        make_trainer(**wrong)


def test_a_log_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "log").write_text("mine")
    with pytest.raises(
        CallerError, match=r"log_directory: found the file .*log, expected a directory\. Each host"
    ):
        make_trainer(log_directory=tmp_path / "log")
    with pytest.raises(
        CallerError, match=r"log_directory: found .*below, which cannot be created \(Not a dir"
    ):
        make_trainer(log_directory=str(tmp_path / "log" / "below"))
    assert (tmp_path / "log").read_text() == "mine"


def test_a_log_directory_that_cannot_be_written_is_refused():
    with pytest.raises(
        CallerError, match=r"log_directory: found /proc/mine, which cannot be created \(No such"
    ):
        make_trainer(log_directory="/proc/mine")
    with pytest.raises(CallerError, match="found the directory /proc/self, which this user may not write to"):
        make_trainer(log_directory="/proc/self")


def test_a_log_directory_that_is_missing_is_created(tmp_path):
    make_trainer(log_directory=tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("group", "wrong", "said"),
    [
        (rj.Checkpoints, {"directory": 3}, "Checkpoints: found directory=3 (int), expected a string or Path"),
        (
            rj.Checkpoints,
            {"directory": "d", "interval_steps": "10"},
            "found interval_steps='10' (str)",
        ),
        (
            rj.Checkpoints,
            {"directory": "d", "max_to_keep": True},
            "max_to_keep=True (bool), expected an integer",
        ),
        (
            rj.Checkpoints,
            {"directory": "d", "timeout_s": None},
            "timeout_s=None (NoneType), expected a number",
        ),
        (
            rj.Evaluation,
            {"data": X, "interval_steps": 1.5},
            "Evaluation: found interval_steps=1.5 (float)",
        ),
        (
            rj.Evaluation,
            {"data": X, "interval_steps": 1, "loss_fn": 3},
            "loss_fn=3 (int), expected a function or None",
        ),
        (rj.EarlyStopping, {"patience": "3"}, "EarlyStopping: found patience='3' (str), expected an integer"),
        (rj.Numerics, {"clip_norm": "1"}, "Numerics: found clip_norm='1' (str), expected a number or None"),
        (rj.Numerics, {"remat": "yes"}, "Numerics: found remat='yes' (str), expected True or False"),
        (
            rj.Numerics,
            {"compute_dtype": "bf16"},
            "compute_dtype: found 'bf16', expected a floating-point type",
        ),
        (rj.Numerics, {"compute_dtype": jnp.float16}, "compute_dtype: found float16, expected jnp.bfloat16"),
        (rj.Numerics, {"ema_decay": 1.0}, "ema_decay: found 1.0, expected a number from 0 up to but not 1"),
        (rj.Parallelism, {"replica_shape": 2}, "found replica_shape=2 (int), expected ReplicaShape"),
        (
            rj.ReadOptions,
            {"shuffle": "yes"},
            "ReadOptions: found shuffle='yes' (str), expected True or False or None",
        ),
        (rj.ReadOptions, {"num_threads": 0}, "num_threads=0, expected at least 1 of each"),
        (
            rj.Planner,
            {"topology": 3},
            "Planner: found topology=3 (int), expected Topology or Path or a string",
        ),
        (rj.ReplicaShape, {"hosts": "2"}, "ReplicaShape: found hosts='2' (str), expected an integer"),
        (
            rj.AccumulationOptions,
            {"reduction": "ordered"},
            "AccumulationOptions: found reduction='ordered' (str)",
        ),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_a_group_of_options_refuses_a_value_of_another_type(group, wrong, said):
    with pytest.raises(CallerError, match=re.escape(said)):
        group(**wrong)


def test_a_group_of_options_takes_numpy_numbers_and_what_the_field_calls_a_number():
    numbers: dict[str, Any] = {"interval_steps": np.int64(3), "timeout_s": np.float32(3)}
    rj.Checkpoints(directory=Path("d"), **numbers)
    rj.Numerics(clip_norm=1, compute_dtype="bfloat16")
    rj.ReplicaShape(per_host="devices", axes=(("data", 2),))
    rj.Planner(topology="meshes/mine.toml", axis_sizes={"tensor": 2})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: make_trainer(microbatchsize=8),
            "Trainer: .* Did you mean microbatch_size",
        ),
        (
            lambda: rj.Checkpoints(directory="d", interval=3),  # pyright: ignore[reportCallIssue]
            "Checkpoints: found no option interval.* Did you mean interval_steps",
        ),
        (lambda: rj.Parallelism(sharded=True), "Did you mean state"),  # pyright: ignore[reportCallIssue]
        (lambda: rj.Numerics(gradient_clip=1.0), "Remove it"),  # pyright: ignore[reportCallIssue]
        (
            lambda: rj.Checkpoints("d"),  # pyright: ignore[reportCallIssue]
            r"found 'd' \(str\) without a name, expected every option by its name: Checkpoints\(directory=",
        ),
    ],
)
def test_unknown_options_and_options_without_a_name_are_refused(make, said):
    with pytest.raises(CallerError, match=said):
        make()


@pytest.mark.parametrize("num_steps", ["10", 1.5, None, True])
def test_a_number_of_steps_is_an_integer(num_steps):
    with pytest.raises(CallerError, match=r"num_steps: found .*, expected an integer"):
        make_trainer().fit(num_steps)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            (None,),
            "run: found None (NoneType), expected a function train(world), which run calls: rj.run(train)",
        ),
        ((lambda: None,), "run: found a function of (), expected train(world)"),
        ((lambda world, options: None,), "run: found a function of (world, options), expected train(world)"),
    ],
    ids=["called", "no parameter", "two parameters"],
)
def test_run_refuses(arguments, said):
    with pytest.raises(CallerError, match=re.escape(said)):
        rj.run(*arguments)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (lambda world: world.steps("10"), "num_steps: found '10' (str), expected an integer"),
        (
            lambda world: world.restore_or_init({"w": 1}),
            "restore_or_init: found a dict, expected a function without",
        ),
        (
            lambda world: world.restore_or_init(lambda key: {}),
            "restore_or_init: found the function <lambda>, expected",
        ),
    ],
    ids=["steps", "a state", "a function of a key"],
)
def test_the_world_refuses(train, said):
    with pytest.raises(CallerError, match=re.escape(said)):
        rj.run(train)


def test_run_refuses_another_finder_of_checkpoints():
    with pytest.raises(
        CallerError, match=r"found 'dir' \(str\) as find_latest_checkpoint, expected a function"
    ):
        rj.run(lambda world: None, find_latest_checkpoint="dir")  # pyright: ignore[reportArgumentType]


def test_a_builtin_without_a_signature_is_not_refused():
    assert find_refused_call(min, 1) is None
