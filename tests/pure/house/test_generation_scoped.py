"""What lives and dies with a generation is in one list, which is walked at one place.

A class that is told of a moment of a generation is a part of the list (`worker.generation_parts.ORDER`), or is reached
from there; nobody else tells it. What looks alike and is something else has its reason here; an entry that is not
needed any more must go.
"""

import ast

from tests.pure.house.package_trees import TREES

LIST, WORKER = "worker/generation_parts.py", "worker/worker.py"
MOMENTS = frozenset({"begin_generation", "keep_devices", "leave_devices", "unwind", "end_generation"})
REACHED = {
    "GenerationScoped": "the protocol",
    "GenerationParts": "walks the list",
    "PipelinedSteps": "registered by the train function as `KeptArrays`; `StateHandover` decides what becomes of it",
}
"""Classes with such a method that are not in the list."""
TELLERS = {
    LIST: "the walk",
    WORKER: "has it walked",
    "worker/committed_state.py": "`KeptArrays`, for the handover",
}
"""Files that call such a method."""
ARRAYS = {
    "Contributions": "of the step in flight, whose state the handover moves, too; also a part of `BlockSums`",
    "PipelineWorker": "for `PipelinedSteps`: its parts move all together, or what was done of the step is dropped",
    "StageRunner": "of `PipelineWorker`",
    "BoundaryLog": "of `StageRunner`",
    "BlockSums": "of `PipelineWorker`",
    "BlockState": "of `PipelineWorker`",
    "HeldShards": "of `CommittedState`; the handover moves them",
    "StepResults": "of `CommittedState`, with the contributions",
}
"""Classes with a `move_to_host`: they know no generation, only that their arrays are to outlive a backend."""
ENTERED = {
    "PipelinedSteps": "by the train function, with its world",
    "PipelineWorker": "by `PipelinedSteps`, with addresses that the hosts have told each other in a collective",
    "BlockPrefetch": "by `PipelinedSteps`, with the placement of units in the world",
    "MailCarrier": "what the next two are to the pipeline",
    "MailService": "with those addresses",
    "LocalMailService": "in its place",
    "Mailbox": "of either",
}
"""Classes with an `enter`: it takes what the train function knows only within the generation, and no order tells."""


def list_classes() -> dict[str, ast.ClassDef]:
    return {
        node.name: node
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def list_methods(definition: ast.ClassDef) -> set[str]:
    return {node.name for node in definition.body if isinstance(node, ast.FunctionDef)}


def find_classes_with(*names: str) -> set[str]:
    return {name for name, node in list_classes().items() if list_methods(node) & set(names)}


def list_parts() -> list[str]:
    """Return the classes of the list, in its order."""
    for node in TREES[LIST].body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "ORDER"
        ):
            assert isinstance(node.value, ast.Dict)
            return [key.id for key in node.value.keys if isinstance(key, ast.Name)]
    raise AssertionError(f"{LIST} has no ORDER")


def test_whoever_is_told_of_a_moment_of_a_generation_is_in_the_list():
    found = find_classes_with(*MOMENTS)
    assert found == {*list_parts(), *REACHED}, "add it to ORDER, with the reason for its place"


def test_a_part_derives_from_the_protocol():
    classes = list_classes()
    for name in {*list_parts(), "KeptArrays"}:
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
        assert "GenerationScoped" in bases, name


def test_nobody_tells_a_part_but_the_walk():
    found = {
        file
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOMENTS
    }
    assert found == set(TELLERS)
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(TREES[WORKER])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOMENTS
    ]
    assert {call.rpartition(".")[0] for call in calls} == {"self._parts"}


def test_a_worker_has_every_part():
    (listing,) = [
        node
        for node in ast.walk(TREES[WORKER])
        if isinstance(node, ast.FunctionDef) and node.name == "_list_parts"
    ]
    (given,) = [node.value for node in listing.body if isinstance(node, ast.Return)]
    assert isinstance(given, ast.List)
    assert len(given.elts) == len(list_parts())


def test_what_moves_arrays_or_is_entered_by_a_train_function_has_its_reason():
    assert find_classes_with("move_to_host") == set(ARRAYS)
    assert find_classes_with("enter") == set(ENTERED)
