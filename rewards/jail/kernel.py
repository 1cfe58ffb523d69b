"""Calls into the C library and the Linux kernel, which raise OSError where the kernel says no."""

import ctypes
import os
import platform

LIBC = ctypes.CDLL(None, use_errno=True)
MACHINE = platform.machine()

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES = 0x20080522  # version 3 of capset's header


def call(name, *arguments):
    """A function of the C library: integers go as long, bytes as char *, ctypes objects as they are."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    returned = getattr(LIBC, name)(*converted)
    if returned < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return returned


def syscall(name, number, *arguments):
    """A system call that the C library has no function for; `name` is for the error."""
    try:
        return call("syscall", number, *arguments)
    except OSError as error:
        raise OSError(error.errno, f"{name}: {os.strerror(error.errno)}") from None


def prctl(option, *arguments):
    """`prctl` with its four arguments, the missing ones 0."""
    return call("prctl", option, *arguments, *[0] * (4 - len(arguments)))


def die_with_parent(signal):
    """Ask for `signal` when the parent ends. A change of user clears this."""
    prctl(_PR_SET_PDEATHSIG, int(signal))


def give_up_privileges():
    """Drop every capability of this process and the chance to gain one by running a program."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
