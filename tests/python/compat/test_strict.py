"""`strict` follows the flow of control, never the process."""

import asyncio
import threading

import pytest
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
