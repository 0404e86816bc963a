"""`ahead`: the next item is made while this one is used; errors and closing pass through."""

import threading

import pytest

from deconstruct.data.overlap import ahead


def numbers(made, closed, fail_at=None):
    try:
        for i in range(4):
            if i == fail_at:
                raise ValueError("item 2 is bad")
            made[i].set()
            yield i
    finally:
        closed.append(threading.current_thread().name)


def events():
    return [threading.Event() for _ in range(4)]


def test_one_item_ahead_and_no_more():
    made = events()
    items = ahead(numbers(made, []))
    for i, item in enumerate(items):
        assert item == i
        if i < 3:
            assert made[i + 1].wait(timeout=10)
        if i < 2:
            assert not made[i + 2].wait(timeout=0.05)
    assert i == 3


def test_an_error_is_raised_in_its_place():
    items = ahead(numbers(events(), [], fail_at=2))
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="item 2 is bad"):
        next(items)


def test_closing_closes_what_is_behind_and_ends_the_thread():
    closed = []
    behind = numbers(events(), closed)  # held, so that only closing ends it
    items = ahead(ahead(behind))
    assert next(items) == 0
    items.close()
    assert len(closed) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
