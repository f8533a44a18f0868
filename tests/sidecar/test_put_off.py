"""What failed is left alone for a while that doubles."""

from midstream.sidecar.put_off import PutOff


def test_each_failure_puts_off_for_twice_as_long_up_to_the_largest_wait() -> None:
    waits = PutOff[str](1.0, 5.0)
    now_s, found = 100.0, []
    for _ in range(5):
        waits.failed("a", now_s)
        until_s = next(s / 10 for s in range(1000, 3000) if s / 10 > now_s and not waits.is_put_off("a", s / 10))
        found.append(round(until_s - now_s, 1))
        now_s = until_s
    assert found == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert not waits.is_put_off("b", now_s)


def test_after_a_success_the_next_wait_is_the_first_again() -> None:
    waits = PutOff[str](1.0, 5.0)
    waits.failed("a", 0.0)
    waits.failed("a", 1.0)
    waits.succeeded("a")
    assert waits.ever() == frozenset()
    waits.failed("a", 10.0)
    assert waits.waiting(10.9) == {"a"}
    assert waits.waiting(11.0) == frozenset()
    assert waits.ever() == {"a"}


def test_what_is_over_is_forgotten() -> None:
    waits = PutOff[int](1.0, 5.0)
    for n in range(100):
        waits.failed(n, 0.0)
    waits.keep({7})
    assert waits.ever() == {7}
