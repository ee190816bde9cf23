"""A program that saves itself with gpucr.

Start the program with ``gpucr run --store DIR -- python train.py``. Then::

    import gpucr

    @gpucr.before_dump
    def close_files(): ...

    @gpucr.after_restore
    def open_files(): ...

    for step in range(1000):
        train(step)
        if step % 100 == 0 and gpucr.checkpoint(f"step-{step}") == gpucr.RESTORED:
            print("this is another life")

Without ``gpucr run --store`` `checkpoint` raises `Error` with the code `NOT_WATCHED`.
"""

import ctypes
import enum
import os
import threading

__all__ = [
    "Code",
    "Error",
    "Outcome",
    "RESTORED",
    "SAVED",
    "after_dump",
    "after_restore",
    "before_dump",
    "checkpoint",
]


class Outcome(enum.IntEnum):
    """What `checkpoint` returns."""

    #: There is an image, and the program continues.
    SAVED = 0
    #: The program was restored, from an image that was made during the call.
    RESTORED = 1


SAVED = Outcome.SAVED
RESTORED = Outcome.RESTORED


class Code(enum.IntEnum):
    """Why the program was not saved, as in gpucr.h."""

    NOT_WATCHED = -1
    NO_CUDA = -2
    CAPTURING = -3
    BAD_NAME = -4
    TAKEN = -5
    BUSY = -6
    NOT_SAVED = -7
    ENDING = -8
    CALLBACK = -9


class Error(RuntimeError):
    """The program was not saved, and continues. `code` is a `Code`, or a number that this version does not know."""

    def __init__(self, code, reason):
        super().__init__(reason or f"error {code}")
        try:
            self.code = Code(code)
        except ValueError:
            self.code = code


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _load():
    # The wheel has the library next to this file; GPUCR_LIBRARY names another one.
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libgpucr.so")
    library = ctypes.CDLL(os.environ.get("GPUCR_LIBRARY") or own)
    library.gpucr_checkpoint.argtypes = [ctypes.c_char_p]
    library.gpucr_checkpoint.restype = ctypes.c_int
    library.gpucr_reason.argtypes = []
    library.gpucr_reason.restype = ctypes.c_char_p
    for name in ("gpucr_before_dump", "gpucr_after_dump", "gpucr_after_restore"):
        getattr(library, name).argtypes = [_CALLBACK, ctypes.c_void_p]
        getattr(library, name).restype = ctypes.c_int
    return library


_library = _load()
# Registered functions are called for as long as the process lives.
_callbacks = []


class _Raised(threading.local):
    """What callbacks have raised in this thread."""

    def __init__(self):
        self.all = []


_raised = _Raised()


def _register(register, function):
    def call(_data):
        try:
            function()
        except BaseException as error:  # what a callback raises must not get lost in C
            _raised.all.append(error)

    callback = _CALLBACK(call)
    _callbacks.append(callback)
    if register(callback, None) != 0:
        raise MemoryError("the callback cannot be registered")
    return function


def before_dump(function):
    """Makes `checkpoint` call `function()` before the dump. A decorator."""
    return _register(_library.gpucr_before_dump, function)


def after_dump(function):
    """Makes `checkpoint` call `function()` after the dump, in the program that continues. A decorator."""
    return _register(_library.gpucr_after_dump, function)


def after_restore(function):
    """Makes `checkpoint` call `function()` in a program that was restored. A decorator."""
    return _register(_library.gpucr_after_restore, function)


def checkpoint(name=None):
    """Saves the whole program, and lets it continue.

    Comes back with `SAVED` when the image is complete, and with `RESTORED` in each program that is restored from it.
    `name` is that of the image in the store; without one it is made up. Callbacks are called in the order in which they
    were registered, in this thread; other threads of Python go on meanwhile. What the first of them that fails has raised
    is raised when the call is over.

    Raises `Error` if the program was not saved.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError("the name of an image is a str")
    if name is not None and "\0" in name:
        raise Error(Code.BAD_NAME, "the name contains a zero byte")
    _raised.all = []
    result = _library.gpucr_checkpoint(None if name is None else name.encode())
    # Before anything else in this thread can make another one of it.
    reason = _library.gpucr_reason().decode(errors="replace")
    if _raised.all:
        raise _raised.all[0]
    if result < 0:
        raise Error(result, reason)
    return Outcome(result)
