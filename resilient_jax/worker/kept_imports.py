"""Imports the modules of the user's from the copies that the job has kept of them. Imports no jax.

1. A module of the user's is one that is imported from source outside of Python's own folders and of this package. It is
   kept at its first import in any process of the job on this run folder, and from then on imported from the copy.
2. What the module sees is as ever: `__file__`, `__spec__` and the lines of a traceback name the file that was copied.
3. A name means the file that it meant at first, also when that is gone, or another one would be found before it.
4. No bytecode of these files is read or written where Python keeps it: whether it fits is decided there by a time in
   seconds, and by a size. It is kept with the copy, which never changes.

The loader of the standard library is changed for all its users, and not only replaced by a finder: libraries that check
types (jaxtyping, beartype) find modules themselves, and derive their loaders from it.
"""

import importlib.util
import linecache
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from resilient_jax.cluster.kept_program import SCRIPT_MODULE, KeptFile, KeptProgram
from resilient_jax.worker.imported_modules import list_installed_folders

logger = logging.getLogger(__name__)

_imports: "_KeptImports | None" = None
"""Those of this process."""


def begin_kept_imports(folder: str) -> None:
    """Import modules of the user's from the program that is kept in this folder from now on; if empty, as ever."""
    global _imports
    if folder and _imports is None:
        _imports = _KeptImports(KeptProgram(Path(folder)))
        _imports.begin()


def are_imports_kept() -> bool:
    """Return whether modules of the user's are imported from copies."""
    return _imports is not None


def find_kept_file(module: str, file: str) -> KeptFile | None:
    """Return what is kept of an imported module's file; None if it is not, or not imported from a copy."""
    return _imports.kept.get((module, os.path.abspath(file))) if _imports is not None else None


def read_script(script: str) -> bytes:
    """Return the source of a script, from the copy that the agent has kept if there is one."""
    content = _imports.read(SCRIPT_MODULE, script) if _imports is not None else None
    return Path(script).read_bytes() if content is None else content


def report_unkept_files(report: Callable[[str, str], object]) -> None:
    """Have `report(file, why)` called for each file that could not be kept, those of the past first."""
    if _imports is not None:
        _imports.report_to(report)


class _KeptImports:
    """The import system of this process, changed.

    Attributes:
        kept: files that were imported from copies, by module and absolute path.
    """

    def __init__(self, program: KeptProgram) -> None:
        self.kept: dict[tuple[str, str], KeptFile] = {}
        self._program = program
        # Not the script: nothing imports it under its name, which is another module's here.
        files = [kept for kept in program.list_files() if kept.module != SCRIPT_MODULE]
        self._files_by_module: dict[str, list[str]] = {}
        for kept in files:
            self._files_by_module.setdefault(kept.module, []).append(kept.file)
        foreign = {*map(str, list_installed_folders()), os.path.realpath(program.folder)}
        self._foreign = tuple(f"{folder}{os.sep}" for folder in foreign)
        self._folders: dict[str, str] = {}
        """Paths of folders without symbolic links."""
        self._unkept: dict[str, str] = {}
        """Why files could not be kept."""
        self._report: Callable[[str, str], object] = _warn

    def begin(self) -> None:
        """Change the import system."""
        get_data, path_stats, get_code = (
            SourceFileLoader.get_data,
            SourceFileLoader.path_stats,
            SourceFileLoader.get_code,
        )

        def get_kept_data(loader: SourceFileLoader, path: str) -> bytes:
            content = self.read(loader.name, path) if path == loader.path and self._is_own(path) else None
            return get_data(loader, path) if content is None else content

        def get_no_stats(loader: SourceFileLoader, path: str) -> object:
            if self._is_own(path):
                raise OSError(f"{path}: the job imports a copy of it")  # what it was means: no bytecode
            return path_stats(loader, path)

        def get_kept_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            # Other loaders make other code of the source.
            if type(loader) is SourceFileLoader and self._is_own(loader.path):
                kept = self._keep(fullname, loader.path)
                if kept is not None:
                    self._show(loader.path, self._program.read(kept))
                    copy = _CopyLoader(fullname, self._program.find_copy(kept), loader.path)
                    return copy.get_code(fullname)
            return get_code(loader, fullname)

        changes = {"get_data": get_kept_data, "path_stats": get_no_stats, "get_code": get_kept_code}
        for name, method in changes.items():
            setattr(SourceFileLoader, name, method)
        sys.meta_path.insert(0, _KeptFinder(self._files_by_module))

    def read(self, module: str, file: str) -> bytes | None:
        """Return the copy of a file, which is kept now if it was not; None if it cannot be.

        Raises:
            KeptFileDamaged: the copy is gone, or has other bytes.
        """
        if (kept := self._keep(module, file)) is None:
            return None
        content = self._program.read(kept)
        self._show(file, content)
        return content

    def report_to(self, report: Callable[[str, str], object]) -> None:
        """Report the files that could not be kept."""
        self._report = report
        for file, why in self._unkept.items():
            report(file, why)

    def _keep(self, module: str, file: str) -> KeptFile | None:
        place = (module, os.path.abspath(file))
        if place not in self.kept:
            try:
                self.kept[place] = self._program.keep(module, file)
            except OSError as error:
                if file not in self._unkept:  # to end a job for this, which goes on, would be worse
                    self._unkept[file] = str(error)
                    self._report(file, str(error))
                return None
        return self.kept[place]

    def _is_own(self, path: str) -> bool:
        # As `realpath` of the file, which looks at each folder of the path again for each of thousands of modules.
        folder, name = os.path.split(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        file = os.path.join(self._folders[folder], name)
        return not (os.path.realpath(file) if os.path.islink(file) else file).startswith(self._foreign)

    def _show(self, file: str, content: bytes) -> None:
        """Have tracebacks show the lines of the copy."""
        try:
            text = importlib.util.decode_source(content)
        except (SyntaxError, UnicodeDecodeError):  # which the compiler reports
            return
        # Without a time: an entry with one is compared with the file on disk.
        linecache.cache[file] = (len(content), None, text.splitlines(keepends=True), file)


class _CopyLoader(SourceFileLoader):
    """Loads the code of a copy, with bytecode beside it, as that of the file that was copied."""

    def __init__(self, fullname: str, copy: str, file: str) -> None:
        super().__init__(fullname, copy)
        self._file = file

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code, which names the file that was copied."""
        code = super().get_code(fullname)
        return code if code is None or code.co_filename == self._file else _name_file(code, self._file)

    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> CodeType:  # pyright: ignore[reportIncompatibleMethodOverride] - the name is importlib's
        """Return compiled source; an error of its syntax names the file that was copied."""
        return super().source_to_code(data, self._file, _optimize=_optimize)  # pyright: ignore[reportCallIssue]


class _KeptFinder(MetaPathFinder):
    """Finds a module where it was first found in the job."""

    def __init__(self, files_by_module: dict[str, list[str]]) -> None:
        self._files_by_module = files_by_module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where the module is; None if it is not known, or several of this name are."""
        files = self._files_by_module.get(fullname, [])
        if len(files) != 1:
            return None
        (file,) = files
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and os.path.abspath(spec.origin) == file:
            return spec  # with whatever loader the hooks of the search path have given it
        is_package = os.path.basename(file) == "__init__.py"
        return importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=SourceFileLoader(fullname, file),
            submodule_search_locations=[os.path.dirname(file)] if is_package else None,
        )


def _name_file(code: CodeType, file: str) -> CodeType:
    """Return code, with that of its functions, that names another file."""
    constants = tuple(
        _name_file(value, file) if isinstance(value, CodeType) else value for value in code.co_consts
    )
    return code.replace(co_filename=file, co_consts=constants)


def _warn(file: str, why: str) -> None:
    logger.warning("%s cannot be kept in the run folder: %s", file, why)
