"""`strict` follows the flow of control, never the process."""

import asyncio
import contextvars
import threading

import pytest
from compat_support import thd_utils

from longspan.compat import nemo


def test_off_by_default_and_on_inside():
    assert not nemo.is_strict()
    with nemo.strict():
        assert nemo.is_strict()
    assert not nemo.is_strict()


def test_nests_and_one_object_may_be_entered_again():
    both = nemo.strict()
    with both, both:
        with nemo.strict():
            pass
        assert nemo.is_strict()
    assert not nemo.is_strict()


def test_ends_when_the_body_raises():
    with pytest.raises(RuntimeError), nemo.strict():
        raise RuntimeError
    assert not nemo.is_strict()


def test_decorates_functions():
    @nemo.strict()
    def inside() -> bool:
        return nemo.is_strict()

    assert inside()
    assert not nemo.is_strict()


def test_other_threads_do_not_see_it():
    seen = []
    with nemo.strict():
        thread = threading.Thread(target=lambda: seen.append(nemo.is_strict()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_other_tasks_do_not_see_it():
    async def strict_task(entered: asyncio.Event, done: asyncio.Event) -> None:
        with nemo.strict():
            entered.set()
            await done.wait()

    async def main() -> bool:
        entered, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(strict_task(entered, done))
        await entered.wait()
        seen = nemo.is_strict()
        done.set()
        await task
        return seen

    assert asyncio.run(main()) is False


def test_leaving_elsewhere_is_harmless():
    one, other = nemo.strict(), nemo.strict()
    elsewhere = contextvars.Context()
    elsewhere.run(one.__enter__)
    with other:
        one.__exit__(None, None, None)  # not entered here
        assert nemo.is_strict()
    assert not nemo.is_strict()
    with nemo.strict():
        assert nemo.is_strict()
    assert not nemo.is_strict()
    elsewhere.run(one.__exit__, None, None, None)
    assert not elsewhere.run(nemo.is_strict)


def test_blocks_may_end_in_any_order():
    one, other = nemo.strict(), nemo.strict()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    one.__exit__(None, None, None)
    assert nemo.is_strict()
    other.__exit__(None, None, None)
    assert not nemo.is_strict()


def test_one_decorated_function_in_many_threads():
    both = threading.Barrier(4)
    seen = []

    @nemo.strict()
    def inside() -> None:
        both.wait()
        seen.append(nemo.is_strict())

    def work() -> None:
        inside()
        seen.append(not nemo.is_strict())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 8


def test_arguments_are_checked_inside_too():
    with nemo.strict(), pytest.raises(TypeError, match="process_input_for_thd: the batch"):
        thd_utils.process_input_for_thd([])
