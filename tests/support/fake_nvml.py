"""A real libnvidia-ml.so.1 with answers of the test's, for processes that are started with its environment."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import patience

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "libnvidia-ml.so.1"


class FakeNvml:
    """The library in a folder, and the file that it answers from."""

    def __init__(self, folder: Path, *, is_old_driver: bool = False) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler builds the library")
        folder.mkdir(exist_ok=True)
        flags = ["-DOLD_DRIVER"] if is_old_driver else []
        command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", *flags]
        subprocess.run([*command, "-o", str(folder / LIBRARY), str(SOURCE)], check=True, timeout=patience(6))
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
