"""A worker's process runs the script and the modules of its user's as the job has kept them."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from resilient_jax.cluster.kept_program import SCRIPT_MODULE, KeptProgram
from resilient_jax.cluster.worker_process import RUN_SCRIPT
from tests.support.paths import ROOT
from tests.support.patience import patience

WAIT_S = patience(6)
SCRIPT = """
import json, os, sys
import one, pack.two, spread.three
if "late" in sys.argv:
    import pack.late
if "loaded" in sys.argv:
    import importlib.util
    folder = os.path.dirname(__file__)
    for file in (f"{folder}/a/config.py", f"{folder}/b/config.py"):
        spec = importlib.util.spec_from_file_location("config", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        print(module.NAME)
values = [RATE := 1, one.VALUE, pack.VALUE, pack.two.VALUE, spread.three.VALUE]
files = [__file__, one.__file__, pack.__file__, pack.two.__spec__.origin, *pack.__path__]
print(json.dumps([values, files, sys.argv, sys.path]))
if "fail" in sys.argv:
    one.fail()
"""
FILES = {
    "train.py": SCRIPT,
    "one.py": "VALUE = 1\n\n\ndef fail():\n    raise ValueError('as usual')\n",
    "pack/__init__.py": "VALUE = 1\n",
    "pack/two.py": "VALUE = 1\n",
    "pack/late.py": "print('late', 1)\n",
    "spread/three.py": "VALUE = 1\n",
    "a/config.py": "NAME = 'a'\n",
    "b/config.py": "NAME = 'b'\n",
}
HOOK = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader

class Loader(SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize=-1):
        return super().source_to_code(data.replace(b"VALUE =", b"VALUE = 10 *"), path, _optimize=_optimize)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or name not in ("one", "pack.two"):
            return None
        spec.loader = Loader(name, spec.origin)
        return spec

sys.meta_path.insert(0, Finder)
"""
"""As those of jaxtyping and beartype: it finds modules itself, and makes other code of their source."""


class Job:
    """A script with modules, and the program that is kept of them."""

    def __init__(self, work: Path, files: Mapping[str, str] = FILES) -> None:
        self.folder = work / "user"
        self.program = KeptProgram(work / "run" / "program")
        for name, source in files.items():
            self.write(name, source)
        self.program.create()
        self.program.keep(SCRIPT_MODULE, str(self.folder / "train.py"))

    def write(self, name: str, source: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.stat() if file.exists() else None
        file.write_text(source)
        if before is not None:  # what Python's own bytecode goes by: the same second, and often the same size
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    def change_all(self) -> None:
        """Change all files, as another version of the program does; some are gone."""
        for name in ("train.py", "pack/__init__.py", "pack/two.py", "pack/late.py"):
            self.write(name, (self.folder / name).read_text().replace("1", "2"))
        (self.folder / "one.py").unlink()
        self.write("one/__init__.py", "VALUE = 2\n")
        self.write("spread/three.py", "VALUE = 2\n\n\n\n")

    def run(
        self, *words: str, start: Sequence[str] | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the script from what is kept, or as the words in `start` do."""
        start = ["-c", RUN_SCRIPT, str(self.program.folder)] if start is None else start
        return subprocess.run(
            [sys.executable, "-u", *start, "train.py", *words],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_kept_script_sees_what_a_script_sees_and_fails_alike(job: Job) -> None:
    expected = job.run("fail", start=[])
    assert "ValueError: as usual" in expected.stderr
    for _ in range(2):  # when it is kept, and from what is kept
        found = job.run("fail")
        assert (found.stdout, found.stderr, found.returncode) == (
            expected.stdout,
            expected.stderr,
            expected.returncode,
        )


def test_a_process_that_starts_later_runs_what_the_first_one_ran(job: Job) -> None:
    first = job.run("fail")
    values, files, *_ = json.loads(first.stdout)
    assert values == [1, 1, 1, 1, 1]
    assert files[:2] == [str(job.folder / "train.py"), str(job.folder / "one.py")]
    job.change_all()
    later = job.run("fail")
    assert (later.stdout, later.stderr) == (first.stdout, first.stderr), "with the lines of what runs"
    assert json.loads(job.run(start=[]).stdout)[0] == [2, 2, 2, 2, 2], "without a job: the script on disk"


def test_what_no_process_has_imported_yet_is_kept_at_its_first_import(job: Job) -> None:
    job.run()
    job.change_all()
    for _ in range(2):
        assert job.run("late").stdout.startswith("late 2")
        job.write("pack/late.py", "print('late', 3)\n")


def test_python_keeps_no_bytecode_beside_files_that_are_kept(job: Job) -> None:
    job.run(start=[])  # whose bytecode is there, and fits by time and size
    job.write("one.py", FILES["one.py"].replace("VALUE = 1", "VALUE = 3"))
    before = {path: path.read_bytes() for path in job.folder.rglob("*.pyc")}
    assert before
    for _ in range(2):
        assert json.loads(job.run().stdout)[0] == [1, 3, 1, 1, 1], "what is in the file, not in the bytecode"
    assert {path: path.read_bytes() for path in job.folder.rglob("*.pyc")} == before
    assert list(job.program.folder.rglob("one*.pyc")), "it is compiled once for the job"


def test_files_that_are_loaded_under_one_name_stay_apart(job: Job) -> None:
    for _ in range(2):
        assert job.run("loaded").stdout.splitlines()[:2] == ["a", "b"]
        job.write("a/config.py", "NAME = 'c'\n")


def test_an_import_hook_with_a_loader_of_its_own_gets_the_kept_source(tmp_path: Path) -> None:
    job = Job(tmp_path, {**FILES, "train.py": f"import hook\n{SCRIPT}", "hook.py": HOOK})
    assert json.loads(job.run(start=[]).stdout)[0] == [1, 10, 1, 10, 1]
    job.write(
        "one.py", FILES["one.py"].replace("VALUE = 1", "VALUE = 3")
    )  # fits the bytecode by time and size
    assert json.loads(job.run().stdout)[0] == [1, 30, 1, 10, 1]
    job.write("one.py", "VALUE = 2\n")
    job.write("pack/two.py", "VALUE = 2\n")
    assert json.loads(job.run().stdout)[0] == [1, 30, 1, 10, 1]


def test_an_error_of_syntax_names_the_file_of_the_user(job: Job) -> None:
    job.write("one.py", "VALUE = = 1\n")
    found = job.run()
    assert found.returncode == 1
    assert f'File "{job.folder / "one.py"}", line 1\n    VALUE = = 1\n' in found.stderr


def test_a_module_that_cannot_be_kept_is_imported_all_the_same_and_named(job: Job) -> None:
    if os.geteuid() == 0:
        # Whatever the mode of a folder is, this user may write there: a file is in its place.
        place = job.program.folder / "files" / str(job.folder / "pack").lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("")
    else:
        (job.program.folder / "files").chmod(0o500)
    found = job.run()
    assert json.loads(found.stdout)[0] == [1, 1, 1, 1, 1]
    assert f"{job.folder / 'pack/two.py'} cannot be kept in the run folder" in found.stderr


def test_a_script_whose_copy_is_gone_does_not_run_from_the_disk(job: Job) -> None:
    job.run()
    Path(job.program.find_copy(job.program.keep(SCRIPT_MODULE, str(job.folder / "train.py")))).unlink()
    found = job.run()
    assert found.returncode == 1
    assert found.stdout == ""
    assert "KeptFileDamaged" in found.stderr
    assert "end all agents of the job" in found.stderr


def test_the_current_folder_is_not_searched_before_the_one_of_the_script(job: Job, tmp_path: Path) -> None:
    (job.folder / "random.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "plain.py"
    script.write_text("import sys, tempfile; print(sys.path[0], sys.argv)\n")
    program = KeptProgram(tmp_path / "plain")
    program.create()
    found = job.run(start=["-c", RUN_SCRIPT, str(program.folder), str(script)])
    assert found.stdout == f"{script.parent} ['{script}', 'train.py']\n", found.stderr
