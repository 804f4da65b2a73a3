"""Caches with a limit, which `ml.debug.caches` prints."""

from __future__ import annotations

from collections.abc import Callable

import mlvm.eager as ml
from mlvm.core.memo import CacheInfo, Memo, caches, memoized
from tests.brief import Capsys, refuses
from tests.threads import in_threads


def _info(name: str) -> CacheInfo:
    [info] = [each for each in caches() if each.name == name]
    return info


def test_the_least_recently_used_entry_is_evicted() -> None:
    memo = Memo[str, str](3, "letters")
    made: list[str] = []

    def make(key: str) -> Callable[[], str]:
        return lambda: made.append(key) or key.upper()  # type: ignore[func-returns-value]

    for key in "abcabdacbd":
        assert memo.get(key, make(key)) == key.upper()
    assert "".join(made) == "abcdcbd"
    assert list(memo.entries) == ["c", "b", "d"]
    assert _info("letters") == ("letters", 1, 3, 3, 3, 7)
    memo.clear()
    assert not len(memo)


def test_a_value_that_another_thread_has_made_meanwhile_is_the_one() -> None:
    memo = Memo[int, object](8, "objects")
    earlier = object()

    def make() -> object:
        memo[0] = earlier
        return object()

    assert memo.get(0, make) is earlier


def test_an_error_leaves_no_entry() -> None:
    memo = Memo[int, float](8, "quotients")
    refuses(ZeroDivisionError, "", memo.get, 0, lambda: 1 / 0)
    assert not len(memo)


def test_threads_share_a_memo() -> None:
    memo = Memo[int, int](16, "squares")

    def work(seed: int) -> bool:
        keys = [(seed * i) % 40 for i in range(1, 2000)]
        return all(memo.get(key, lambda key=key: key * key) == key * key for key in keys)  # type: ignore[misc]

    assert all(in_threads(work, range(1, 5)))
    info = _info("squares")
    assert info.size == 16
    assert info.hits + info.misses == 4 * 1999


def test_functions_and_memos_are_listed(capsys: Capsys) -> None:
    @memoized(2)
    def halved(x: int) -> float:
        return x / 2

    assert [halved(x) for x in (1, 2, 2, 3)] == [0.5, 1.0, 1.0, 1.5]
    name = f"{halved.__module__}.{halved.__qualname__}"
    assert _info(name) == (name, 1, 2, 2, 1, 3)
    ml.debug.caches()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["number", "size", "limit", "hits", "misses", "name"]
    assert [*_info(name)[1:], name] == next(
        [*map(int, row.split()[:-1]), name] for row in rows if row.endswith(name)
    )


def test_no_cache_is_above_its_limit() -> None:
    assert ml.grad(lambda x: ml.sum(x * x))(ml.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert {"core.op", "eager.tensor.apply calls"} <= {each.name for each in caches()}
    assert all(0 <= each.size <= each.limit for each in caches())
