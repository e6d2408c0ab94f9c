"""A file of a program is kept as it was first read, and a change of it on disk is found."""

import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from resilient_jax.cluster.kept_program import KeptProgram, find_changed_files
from resilient_jax.errors import KeptFileDamaged


@pytest.fixture
def program(tmp_path: Path) -> KeptProgram:
    program = KeptProgram(tmp_path / "run" / "program")
    program.create()
    return program


@pytest.fixture
def script(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text("rate = 0.1\n")
    return script


def test_the_first_content_of_a_file_stays(program: KeptProgram, script: Path) -> None:
    first = program.keep("__main__", str(script))
    script.write_text("rate = 0.2\n")
    later = KeptProgram(program.folder)  # of another process
    later.create()
    assert later.keep("__main__", str(script)) == first
    assert later.read(first) == b"rate = 0.1\n"
    # Under another name it is the same file.
    assert later.read(later.keep("train", str(script))) == b"rate = 0.1\n"
    script.unlink()
    assert KeptProgram(program.folder).read(first) == b"rate = 0.1\n"


def test_two_files_of_one_module_name_are_two(program: KeptProgram, script: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "train.py"
    other.parent.mkdir()
    other.write_text("rate = 0.3\n")
    found = [program.read(program.keep("config", str(file))) for file in (script, other)]
    assert found == [b"rate = 0.1\n", b"rate = 0.3\n"]
    assert sorted(kept.file for kept in program.list_files()) == sorted([str(other), str(script)])


def test_of_processes_that_keep_a_file_at_once_all_have_the_same_content(
    program: KeptProgram, script: Path
) -> None:
    found: list[bytes] = []

    def keep(index: int) -> None:
        script.write_text(f"rate = {index}\n")
        mine = KeptProgram(program.folder)
        found.append(mine.read(mine.keep("__main__", str(script))))

    threads = [threading.Thread(target=keep, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_nobody_else_may_read_what_is_kept(program: KeptProgram, script: Path) -> None:
    program.keep("__main__", str(script))
    program.note_change(str(script))
    assert stat.S_IMODE(program.folder.stat().st_mode) == 0o700
    files = [path for path in program.folder.rglob("*") if path.is_file()]
    assert len(files) == 3, "nothing unfinished is left"
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_file_has_changed_as_long_as_its_content_is_another_one(program: KeptProgram, script: Path) -> None:
    program.keep("__main__", str(script))
    unchanged: dict[str, tuple[int, ...]] = {}
    assert find_changed_files(program, unchanged) == []
    os.utime(script, (1, 1))
    assert find_changed_files(program, unchanged) == [], "only its time is another one"
    script.write_text("rate = 0.2\n")  # as long as before
    assert [kept.file for kept in find_changed_files(program, unchanged)] == [str(script)]
    script.unlink()
    assert [kept.file for kept in find_changed_files(program, unchanged)] == [str(script)]
    script.write_text("rate = 0.1\n")
    assert find_changed_files(program, unchanged) == []


def test_a_change_is_noted_by_one_process(program: KeptProgram, script: Path) -> None:
    assert program.note_change(str(script))
    assert not KeptProgram(program.folder).note_change(str(script))
    assert program.note_change(str(script.with_name("model.py")))


def test_a_copy_that_is_not_what_was_written_is_refused(program: KeptProgram, script: Path) -> None:
    kept = program.keep("__main__", str(script))
    copy = Path(program.find_copy(kept))
    copy.write_text("rate = 0.3\n")
    with pytest.raises(KeptFileDamaged, match=r"found another content, expected .*train\.py"):
        program.read(kept)
    copy.unlink()
    with pytest.raises(KeptFileDamaged, match="end all agents of the job"):
        program.read(kept)
    (record,) = (program.folder / "records").iterdir()
    record.write_bytes(b"{")
    with pytest.raises(KeptFileDamaged, match="cannot be read"):
        KeptProgram(program.folder).keep("__main__", str(script))


def test_without_its_folder_a_program_is_not_begun_anew(tmp_path: Path, script: Path) -> None:
    with pytest.raises(KeptFileDamaged, match="found no such folder"):
        KeptProgram(tmp_path / "removed").keep("__main__", str(script))
    assert not (tmp_path / "removed").exists()


def test_a_folder_that_was_removed_is_made_again_from_the_same_files(
    program: KeptProgram, script: Path
) -> None:
    kept = program.keep("__main__", str(script))
    shutil.rmtree(program.folder)
    program.restore()
    program.restore()
    later = KeptProgram(program.folder)
    assert later.list_files() == [kept]
    assert later.read(kept) == b"rate = 0.1\n"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_that_was_removed_is_not_made_again_from_other_files(
    program: KeptProgram, script: Path, is_there: bool
) -> None:
    program.keep("__main__", str(script))
    shutil.rmtree(program.folder)
    script.write_text("rate = 0.2\n") if is_there else script.unlink()
    with pytest.raises(
        KeptFileDamaged, match=r"found nothing, and .*on disk.*, expected .* as the job read it first"
    ):
        program.restore()
