"""Calls of the C library and the Linux kernel that raise OSError on failure."""

import ctypes
import os
import platform

LIBC = ctypes.CDLL(None, use_errno=True)
MACHINE = platform.machine()

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES = 0x20080522  # version 3 of capset's header


def call(name, *arguments):
    """Call a function of the C library: integers are passed as long, bytes as char *, ctypes objects unchanged."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    returned = getattr(LIBC, name)(*converted)
    if returned < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return returned


def syscall(name, number, *arguments):
    """Make a system call without a C function; `name` is for the error."""
    try:
        return call("syscall", number, *arguments)
    except OSError as error:
        raise OSError(error.errno, f"{name}: {os.strerror(error.errno)}") from None


def prctl(option, *arguments):
    """Call `prctl` with four arguments, padded with 0."""
    return call("prctl", option, *arguments, *[0] * (4 - len(arguments)))


def die_with_parent(signal):
    """Request `signal` when the parent ends. A change of user clears this."""
    prctl(_PR_SET_PDEATHSIG, int(signal))


def give_up_privileges():
    """Drop all capabilities of this process and the ability to gain one by running a program."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
