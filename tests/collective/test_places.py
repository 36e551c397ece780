"""Every rank learns its place with a handful of requests, however many ranks there are."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta

import pytest

from aggregator.collective.places import find_place, forget_place, this_host
from aggregator.collective.tree import plan_tree


class _CountingStore:
    """A store in this process that counts the requests of each thread."""

    def __init__(self):
        self.values = {}
        self.requests = Counter()
        self._changed = threading.Condition()

    def set(self, key, value):
        with self._changed:
            self.requests[threading.current_thread().name] += 1
            self.values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key):
        self.requests[threading.current_thread().name] += 1
        return self.values[key]

    def wait(self, keys, timeout: timedelta):
        self.requests[threading.current_thread().name] += 1
        with self._changed:
            if not self._changed.wait_for(lambda: self.values.keys() >= set(keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def delete_key(self, key):
        return self.values.pop(key, None) is not None


def _find_all(hosts, timeout_s=20.0):
    store, found = _CountingStore(), {}

    def find(rank, host):
        place = find_place(store, rank, len(hosts), host=host, fan_in=4, timeout_s=timeout_s)
        found[rank] = place

    threads = [threading.Thread(target=find, args=pair, name=str(pair[0])) for pair in enumerate(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return store, found


@pytest.mark.parametrize("world_size", [2, 40])
def test_a_rank_makes_three_requests_whatever_the_size_of_the_world(world_size):
    hosts = [f"node{rank // 3}" for rank in range(world_size)]
    store, found = _find_all(hosts)
    assert tuple(found[rank] for rank in range(world_size)) == plan_tree(hosts, 4)
    assert {store.requests[str(rank)] for rank in range(1, world_size)} == {3}
    for rank in range(world_size):
        forget_place(store, rank)
    assert store.values == {}


def test_without_all_ranks_there_is_no_place_after_the_deadline():
    with pytest.raises(RuntimeError):
        find_place(_CountingStore(), 0, 2, host=None, fan_in=4, timeout_s=0.05)


def test_the_name_of_this_host_is_the_same_at_every_call():
    assert this_host() == this_host() != ""
