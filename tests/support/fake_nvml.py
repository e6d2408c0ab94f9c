"""A real libnvidia-ml.so.1 with answers of the test's, for processes that are started with its environment."""

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.patience import patience

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "libnvidia-ml.so.1"


@functools.cache
def build(*, is_old_driver: bool) -> bytes:
    """Return the library, which is compiled once for all tests of this process."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler builds the library")
    flags = ["-DOLD_DRIVER"] if is_old_driver else []
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, LIBRARY)
        command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", *flags, "-o", str(built), str(SOURCE)]
        subprocess.run(command, check=True, timeout=patience(6))
        return built.read_bytes()


class FakeNvml:
    """The library in a folder, and the file that it answers from."""

    def __init__(self, folder: Path, *, is_old_driver: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        (folder / LIBRARY).write_bytes(build(is_old_driver=is_old_driver))
        self._answers = folder / "answers"
        self._num_xids = 0
        self._values: dict[str, int] = {}
        self.answer()
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        self.environment = {"LD_LIBRARY_PATH": path, "FAKE_NVML": str(self._answers)}

    def answer(self, **values: int) -> None:
        """Have the library answer this from now on, as well; `gpu0__clock` is the key `gpu0.clock`."""
        self._values |= {key.replace("__", "."): value for key, value in values.items()}
        new = self._answers.with_suffix(".new")
        new.write_text("".join(f"{key} {value}\n" for key, value in self._values.items()))
        new.replace(self._answers)  # the library never sees half of it

    def report_xid(self, gpu: int, code: int) -> None:
        """Have those that wait for XIDs hear one."""
        self._num_xids += 1
        self.answer(xid__gpu=gpu, xid__code=code, xid__serial=self._num_xids)
