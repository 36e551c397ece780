"""Ranks find each other by a name that no earlier attempt can have left behind."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from aggregator.collective.attempt import Attempt
from telemetry.errors import AttachTimeoutError


class SharedStore:
    """A store in memory, shared by threads that play ranks."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.lock = threading.Lock()

    def part(self, prefix: str) -> StorePart:
        return StorePart(self, f"{prefix}/" if prefix else "")


class StorePart:
    def __init__(self, whole: SharedStore, prefix: str) -> None:
        self.whole, self.prefix = whole, prefix

    def set(self, key: str, value: str) -> None:
        self.whole.keys[self.prefix + key] = value

    def get(self, key: str) -> bytes:
        return self.whole.keys[self.prefix + key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(self.prefix + key in self.whole.keys for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self.whole.lock:
            total = int(self.whole.keys.get(self.prefix + key, "0")) + amount
            self.whole.keys[self.prefix + key] = str(total)
            return total


def agree(store: SharedStore, rank: int, world_size: int, *, after_s: float = 0.0, for_s: float = 20.0) -> str:
    time.sleep(after_s)
    attempt = Attempt(store.part, rank, world_size)
    attempt.agree(time.monotonic() + for_s, for_s)
    return attempt.prefix


def attempt_of_all(store: SharedStore, world_size: int, late: int | None = None) -> set[str]:
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [
            pool.submit(agree, store, rank, world_size, after_s=0.2 if rank == late else 0.0)
            for rank in range(world_size)
        ]
        return {rank.result(30) for rank in ranks}


@pytest.mark.parametrize("late", [None, 0, 3])
def test_all_ranks_agree_whoever_is_late(late):
    assert len(attempt_of_all(SharedStore(), 4, late)) == 1


@pytest.mark.parametrize("late", [0, 2])
def test_the_names_of_earlier_attempts_are_never_believed(late):
    store, names = SharedStore(), set()
    for _ in range(3):
        (name,) = attempt_of_all(store, 3, late)
        assert name not in names
        names.add(name)


def test_an_attempt_that_died_half_way_confuses_nobody():
    store = SharedStore()
    with ThreadPoolExecutor(2) as pool:
        for dead in [pool.submit(agree, store, rank, 3, for_s=0.2) for rank in (0, 1)]:
            with pytest.raises(AttachTimeoutError):
                dead.result(30)
    assert len(attempt_of_all(store, 3, 0)) == 1


def test_more_ranks_than_are_confirmed_at_once_agree():
    assert len(attempt_of_all(SharedStore(), 70)) == 1


def test_the_ranks_that_did_not_come_are_named():
    store = SharedStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(agree, store, rank, 4, for_s=0.5) for rank in (0, 2))
        for rank in (first, second):
            with pytest.raises(AttachTimeoutError) as caught:
                rank.result(30)
            assert set(caught.value.failures) == {1, 3}
    with pytest.raises(AttachTimeoutError) as caught:
        agree(SharedStore(), 1, 2, for_s=0.1)
    assert set(caught.value.failures) == {0}
