"""A run with many tags: which manifests are read, and how often."""

import os
from pathlib import Path

import pytest
from conftest import small_manifest

from runtime.checkpoint import manifest
from runtime.checkpoint.manifest import sign_manifest
from runtime.checkpoint.tags import TagStore

MANY = 200


def write_tag(store, iter_num, improved=False, best_val_loss=0.5):
    """Write a tag that has nothing but its manifest."""
    folder = Path(store.path(f"iter_{iter_num}"))
    folder.mkdir(exist_ok=True)
    content = small_manifest(iter_num, improved=improved, best_val_loss=best_val_loss)
    (folder / "manifest.json").write_text(sign_manifest(content))


@pytest.fixture
def store(tmp_path):
    """The store of MANY tags. The second is the best one."""
    store = TagStore(tmp_path)
    for iter_num in range(1, MANY + 1):
        write_tag(store, iter_num, improved=iter_num <= 2)
    store.link_best()
    return store


@pytest.fixture
def reads(store, monkeypatch):
    """The names of the tags whose manifests are read, in order."""
    names = []
    read_signed = manifest.read_signed

    def recorded(path):
        names.append(os.path.basename(os.path.dirname(path)))
        return read_signed(path)

    monkeypatch.setattr(manifest, "read_signed", recorded)
    return names


def test_each_manifest_is_read_once(store, reads):
    """Also by another store of this process. Then a save reads its own manifest, and best's."""
    assert TagStore(store.out_dir).newest() == f"iter_{MANY}"
    store.prune(keep_last=2 * MANY)
    assert store.newer_than(MANY - 2) == [f"iter_{MANY - 1}", f"iter_{MANY}"]
    assert not [name for name in set(reads) if reads.count(name) > 2], reads  # a new link changes a file's status
    reads.clear()
    write_tag(store, MANY + 1)
    store.prune(keep_last=2 * MANY)
    assert reads == [f"iter_{MANY + 1}"]
    assert store.find_best() == ("iter_2", 0.5)


def test_a_manifest_that_has_changed_is_read_again(store):
    assert store.find_best() == ("iter_2", 0.5)
    write_tag(store, 7, improved=True, best_val_loss=0.25)
    assert store.find_best() == ("iter_7", 0.25)
    with open(store.path("iter_7", "/manifest.json"), "a") as file:
        file.write(" ")
    assert store.find_best() == ("iter_2", 0.5)


def test_the_order_of_tags_is_that_of_their_manifests(store, tmp_path):
    """A user may rename a tag: it is still the one of iteration 2, and goes first."""
    (tmp_path / "iter_2").rename(tmp_path / "iter_900")
    assert store.newest() == f"iter_{MANY}" and store.find_best() == ("iter_900", 0.5)
    store.prune(keep_last=5)
    assert store.list() == [*(f"iter_{i}" for i in range(MANY - 4, MANY + 1)), "best"]


def test_a_second_damaged_tag_takes_the_place_of_the_first(tmp_path):
    """A run that resumes before it saves the tag again, and finds it damaged again."""
    store = TagStore(tmp_path)
    for text in ("first", "second"):
        write_tag(store, 4)
        (tmp_path / "iter_4" / "weights.pt").write_text(text)
        assert store.move_away("iter_4") == str(tmp_path / "iter_4.damaged")
        assert os.listdir(tmp_path) == ["iter_4.damaged"]
        assert (tmp_path / "iter_4.damaged" / "weights.pt").read_text() == text
