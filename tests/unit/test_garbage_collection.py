"""Doing without garbage collections: none runs, and what exists is found by a later one."""

import gc
import weakref

from rankwise.lazy_names import CollectionsPaused, move_to_oldest_generation


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_collections_are_paused() -> None:
    """In the block there is none; afterwards it is as before."""
    assert gc.isenabled()
    with CollectionsPaused():
        assert not gc.isenabled()
        with CollectionsPaused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_objects_are_moved_without_a_collection() -> None:
    """The number of young objects is zero then, and no generation was searched."""
    before = [each["collections"] for each in gc.get_stats()]
    with CollectionsPaused():
        kept = [Node() for _ in range(100)]
        assert gc.get_count()[0] >= len(kept)
        move_to_oldest_generation()
        assert gc.get_count()[0] < len(kept)
        assert [each["collections"] for each in gc.get_stats()] == before
    assert gc.get_freeze_count() == 0


def test_moved_garbage_is_found() -> None:
    """A cycle that nothing refers to any more is freed by the next full collection."""
    node = Node()
    freed = weakref.ref(node)
    del node
    move_to_oldest_generation()
    gc.collect()
    assert freed() is None


def test_objects_that_the_program_has_frozen_stay_so() -> None:
    """Nothing is moved then, as that would unfreeze them."""
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        move_to_oldest_generation()
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
