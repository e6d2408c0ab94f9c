"""A standby runs the script as `python SCRIPT` would, once its agent orders it to."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from resilient_jax.cluster.kept_program import KeptProgram
from resilient_jax.ids import HostName
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.standby_messages import (
    STANDBY_CONNECTION_VARIABLE,
    STANDBY_MESSAGE_DECODER,
    PrepareStandby,
    PromoteStandby,
    StandbyMessage,
    StandbyOrder,
    StandbyPromoted,
    StandbyReady,
    StandbyUnfit,
)
from resilient_jax.protocol.worker_messages import ImportsReported, WorkerSettings
from tests.support.paths import ROOT
from tests.support.patience import patience

WAIT_S = patience(6)
SETTINGS = WorkerSettings(job="job", host=HostName("host-0"), address="127.0.0.1", token="token")
NUM_WORKER_DESCRIPTORS = 3

SCRIPT = '''
"""A script that shows what it sees, and fails."""
import multiprocessing, os, pickle, sys

class Thing:
    """Pickled by its place in `__main__`."""

def double(value):
    return 2 * value

def main():
    module = sys.modules["__main__"]
    hidden = ("Thing", "double", "main", "fail", "__cached__")
    seen = {name: repr(value).split(" at 0x")[0] for name, value in vars(module).items() if name not in hidden}
    print(sorted(seen.items()))
    print(__name__, __file__, sys.argv, sys.path)
    print({k: v for k, v in sorted(os.environ.items()) if not k.startswith("RESILIENT_JAX")})
    print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [21]))
    fail()

def fail():
    raise ValueError("as usual")

if __name__ == "__main__":
    main()
'''


class Standby(NamedTuple):
    """A standby's process, and the agent's end of its connection."""

    process: subprocess.Popen[str]
    connection: Connection[StandbyOrder, StandbyMessage]

    def receive(self) -> StandbyMessage:
        (received,) = self.connection.receive(WAIT_S)
        return received.message

    def promote(self, environment: dict[bytes, bytes]) -> StandbyMessage:
        with open(os.devnull) as file:
            order = PromoteStandby(settings=SETTINGS, environment=environment)
            self.connection.send(order, [file.fileno()] * NUM_WORKER_DESCRIPTORS)
        return self.receive()


@contextlib.contextmanager
def standby(
    command: Sequence[str],
    imports: ImportsReported,
    folder: Path,
    environment: dict[str, str],
    program: str = "",
) -> Iterator[Standby]:
    """Run a standby that has got its first order."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "resilient_jax.worker.standby_process"],
            env={**environment, STANDBY_CONNECTION_VARIABLE: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            text=True,
        )
    connection = Connection[StandbyOrder, StandbyMessage](ours.detach(), STANDBY_MESSAGE_DECODER)
    with process, contextlib.closing(connection):
        try:
            connection.send(PrepareStandby(command=tuple(command), imports=imports, program=program))
            yield Standby(process, connection)
        finally:
            process.kill()


def describe(modules: dict[str, str], path: Sequence[str] = ()) -> ImportsReported:
    return ImportsReported(modules=modules, search_path=(*path, *sys.path), environment={})


def test_the_script_of_a_standby_sees_what_a_started_script_sees(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    script = tmp_path / "sub" / "script.py"
    script.write_text(SCRIPT)
    command = ["sub/script.py", "--rate", "0.1"]
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    expected = subprocess.run(
        [sys.executable, "-u", *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert "[42]" in expected.stdout, expected.stderr
    fractions = str(Path(os.__file__).with_name("fractions.py"))
    at_import = {**environment, "ONLY_AT_IMPORT": "1"}
    with standby(command, describe({"fractions": fractions}), tmp_path, at_import) as waiting:
        assert waiting.receive() == StandbyReady()
        assert waiting.promote({k.encode(): v.encode() for k, v in environment.items()}) == StandbyPromoted()
        output, errors = waiting.process.communicate(timeout=WAIT_S)
    assert output == expected.stdout
    assert errors == expected.stderr
    assert "ValueError: as usual" in errors
    assert waiting.process.returncode == expected.returncode == 1


def write_modules(folder: Path, **sources: str) -> dict[str, str]:
    """Write modules, and return their files by name."""
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return {name: str(folder / f"{name}.py") for name in sources}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the folder of a script that prints which libraries were imported before it."""
    (tmp_path / "script.py").write_text(
        "import sys; print(sorted({'good', 'bad', 'ends'} & set(sys.modules)))"
    )
    return tmp_path


def test_modules_that_cannot_be_imported_are_left_to_the_script(job: Path) -> None:
    libraries = job.parent / f"{job.name}-libraries"
    modules = write_modules(
        libraries, bad="raise RuntimeError('no')", ends="import sys; sys.exit(3)", good="found = 1"
    )
    with standby(["script.py"], describe(modules, [str(libraries)]), job, dict(os.environ)) as waiting:
        assert waiting.receive() == StandbyReady(failed_imports=2)
        assert waiting.promote(dict(os.environb)) == StandbyPromoted()
        assert waiting.process.communicate(timeout=WAIT_S) == ("['good']\n", "")
        assert waiting.process.returncode == 0


def test_a_standby_with_other_modules_than_the_worker_is_unfit(job: Path) -> None:
    libraries = job.parent / f"{job.name}-libraries"
    modules = write_modules(libraries, good="found = 1")
    elsewhere = {"good": "/elsewhere/good.py"}
    with standby(["script.py"], describe(elsewhere, [str(libraries)]), job, dict(os.environ)) as waiting:
        answer = waiting.receive()
        assert isinstance(answer, StandbyUnfit)
        assert modules["good"] in answer.reason
        assert "/elsewhere/good.py" in answer.reason
        assert waiting.process.wait(WAIT_S) == 1


def test_a_standby_refuses_its_promotion_if_a_module_has_changed(job: Path) -> None:
    libraries = job.parent / f"{job.name}-libraries"
    modules = write_modules(libraries, good="found = 1")
    with standby(["script.py"], describe(modules, [str(libraries)]), job, dict(os.environ)) as waiting:
        assert waiting.receive() == StandbyReady()
        write_modules(libraries, good="found = 2")
        answer = waiting.promote(dict(os.environb))
        assert isinstance(answer, StandbyUnfit)
        assert f"{modules['good']} was changed" in answer.reason
        assert waiting.process.communicate(timeout=WAIT_S) == ("", ""), "the script has not run"


def test_a_standby_runs_the_program_that_is_kept_whatever_has_changed(job: Path) -> None:
    libraries = job.parent / f"{job.name}-libraries"
    modules = write_modules(libraries, good="found = 1")
    script = job / "script.py"
    script.write_text("import good, late; print('script', 1, good.found, late.found)\n")
    write_modules(job, late="found = 1")
    program = KeptProgram(job / "run")
    program.create()
    for module, file in {"__main__": script, "good": modules["good"], "late": job / "late.py"}.items():
        program.keep(module, str(file))
    imports = describe(modules, [str(libraries)])
    environment = {**os.environ, "PYTHONPATH": f"{libraries}:{ROOT}"}
    with standby(["script.py"], imports, job, environment, str(program.folder)) as waiting:
        assert waiting.receive() == StandbyReady()
        write_modules(libraries, good="found = 2")
        write_modules(job, late="found = 2")
        script.write_text(script.read_text().replace("1", "2"))
        promoted = {name.encode(): value.encode() for name, value in environment.items()}
        assert waiting.promote(promoted) == StandbyPromoted()
        assert waiting.process.communicate(timeout=WAIT_S) == ("script 1 1 1\n", "")


def test_a_standby_imports_no_jax_of_its_own_accord() -> None:
    code = "import sys, resilient_jax.worker.standby_process; print({'jax', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert found.stdout.strip() == "set()", "the script may set variables before it imports jax"
