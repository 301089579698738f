"""Decides whether a piece of work is done in a second process meanwhile: parsing holds the interpreter, so threads do not help.

Rule order: here, where there is one processor or a second thread (a fork copies only the one that forks); here, where a
process or a pipe cannot be had; else in a forked child, which sends its result back. Whatever goes wrong there, an exception
of the work included, has the work done here once more, so that what it raises is raised here.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """`with Beside(work) as other: ...; other.result()`. The result must be one that pickle can carry."""

    def __init__(self, work: Callable[[], T]):
        self._work = work
        self._child: int | None = None
        self._pipe: BinaryIO | None = None

    def __enter__(self) -> Beside[T]:
        if threading.active_count() > 1 or len(os.sched_getaffinity(0)) < 2:
            return self
        try:
            reader, writer = os.pipe()
        except OSError:
            return self
        try:
            child = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            return self
        if child == 0:
            self._in_the_child(reader, writer)
        os.close(writer)
        self._child, self._pipe = child, os.fdopen(reader, "rb")
        return self

    def _in_the_child(self, reader: int, writer: int) -> None:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(self._work(), pipe, pickle.HIGHEST_PROTOCOL)
            status = 0
        except BaseException:  # the parent does the work itself and raises what there is to raise
            pass
        finally:
            os._exit(status)

    def result(self) -> T:
        """What the work gave; raises what it raises."""
        if self._pipe is not None:
            with suppress(Exception):
                return pickle.load(self._pipe)  # from our own child
        return self._work()

    def __exit__(self, *_) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._child, 0)
