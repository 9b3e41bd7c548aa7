"""Files are replaced in one step, and JSON that UTF-8 cannot hold is refused."""

import errno
import os
from unittest.mock import Mock

import pytest

from runtime.files import draft, locked, read_json


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_draft_replaces_a_file_or_an_empty_folder_also_behind_a_link(kind, tmp_path):
    path, link = tmp_path / "path", tmp_path / "link"
    link.symlink_to(path)

    def put(new, text):
        if kind == "folder":
            new.mkdir()
            new /= "x"
        new.write_text(text)

    left = tmp_path / "path.draft"
    put(left, "of a killed process")
    if kind == "folder":
        path.mkdir()
    with draft(link) as new:
        assert new == left and not left.exists()
        put(new, "text")
    assert (path / "x" if kind == "folder" else path).read_text() == "text"
    with pytest.raises(KeyError), draft(link) as new:
        put(new, "another")
        raise KeyError
    assert (path / "x" if kind == "folder" else path).read_text() == "text"
    assert {*tmp_path.iterdir()} == {path, link} and link.is_symlink()


def test_a_process_that_is_killed_after_the_replacement_leaves_nothing(tmp_path):
    """A folder for drafts would remain, since the file is there and no later run replaces it."""
    child = os.fork()
    if not child:
        replace = os.replace

        def replace_and_die(*paths):
            replace(*paths)
            os._exit(0)

        os.replace = replace_and_die
        with draft(tmp_path / "new" / "path") as new:
            new.write_text("text")
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["path"]


def test_half_of_a_surrogate_pair_is_named_with_its_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(r'{"a": ["b \ud83d\ude00 \ud800"]}')
    with pytest.raises(ValueError) as error:
        read_json(path)
    assert str(error.value) == rf"{path}: '\ud800' is half of a surrogate pair, not a character"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_keeps_no_lock(tmp_path, monkeypatch, number):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, "No locks")))
    with pytest.raises(OSError, match="out.jsonl: its file system has no locks"):
        with locked(tmp_path / "out.jsonl"):
            pass
    assert [*tmp_path.iterdir()] == []
