"""Worked out once, however many ask, and not used for longer than promised."""

import threading

from flmarket.broker.core import Recent


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def test_a_value_is_kept_for_its_seconds_and_no_longer():
    clock, made = Clock(), []
    recent = Recent(2.0, clock=clock)

    def make():
        made.append(clock.time)
        return len(made)

    assert [recent.get("a", make) for _ in range(3)] == [1, 1, 1]
    clock.time = 1.999
    assert recent.get("a", make) == 1
    clock.time = 2.0
    assert recent.get("a", make) == 2
    assert recent.get("b", make) == 3, "another key has a value of its own"
    assert made == [0.0, 2.0, 2.0]


def test_many_who_ask_at_once_cause_one_piece_of_work():
    recent, begun, go, made = Recent(60.0), threading.Event(), threading.Event(), []

    def make():
        begun.set()
        assert go.wait(30)
        made.append(1)
        return object()

    answers = []
    threads = [threading.Thread(target=lambda: answers.append(recent.get("a", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    go.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len({id(answer) for answer in answers}) == 1


def test_what_fails_is_not_kept():
    recent = Recent(60.0)

    def fail():
        raise ValueError("the database is away")

    for _ in range(2):
        try:
            recent.get("a", fail)
        except ValueError:
            pass
        else:
            raise AssertionError("the failure was hidden")
    assert recent.get("a", lambda: 7) == 7
