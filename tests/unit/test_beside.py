"""Work in a second process: its result, or the work done here where there is none."""

from __future__ import annotations

import os
import threading
import time

import pytest

from entrypoint.beside import Beside

two_processors = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="DID NOT RUN: one processor")


@two_processors
def test_the_work_is_done_by_another_process_meanwhile():
    with Beside(os.getpid) as other:
        assert other.result() != os.getpid()


@two_processors
def test_what_is_raised_there_is_raised_here():
    done_by = []

    def fail():
        done_by.append(os.getpid())
        raise ValueError("as here")

    with Beside(fail) as other, pytest.raises(ValueError, match="as here"):
        other.result()
    assert done_by == [os.getpid()]


@two_processors
def test_a_result_that_cannot_be_sent_and_a_child_that_dies_cost_a_second_run():
    with Beside(lambda: lambda: 7) as other:
        assert other.result()() == 7
    here = os.getpid()
    with Beside(lambda: os.getpid() if os.getpid() == here else os._exit(0)) as other:
        assert other.result() == here


def test_with_other_threads_the_work_is_done_here():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with Beside(os.getpid) as other:
            assert other.result() == os.getpid()
    finally:
        stop.set()
        thread.join()


@two_processors
def test_a_result_that_nobody_asks_for_leaves_no_process():
    begun = time.monotonic()
    with Beside(lambda: time.sleep(60)) as other:
        child = other._child
    assert time.monotonic() - begun < 10
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
