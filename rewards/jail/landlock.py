"""Landlock: restrict the folders that may be read and written, for any user (Linux 5.13; complete from 6.2)."""

import ctypes
import os

import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights by version; 16 from version 5
_BIND_AND_CONNECT = 0b11  # TCP, from version 4
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11  # to processes outside, from version 6


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def restrict(readable, writable):
    """Allow only reading beneath `readable` folders and everything beneath `writable` ones from now on."""
    version = kernel.syscall("landlock", _CREATE_RULESET, None, 0, 1)
    everything = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    handled = [everything, _BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS]
    handled = handled[: 1 + (version >= 4) + (version >= 6)]
    attributes = (ctypes.c_uint64 * len(handled))(*handled)
    rules = kernel.syscall("landlock", _CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    rights = {**dict.fromkeys(readable, _READ_FILE | _READ_DIR), **dict.fromkeys(writable, everything)}
    for folder, allowed in rights.items():
        handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        kernel.syscall("landlock", _ADD_RULE, rules, 1, ctypes.byref(_Beneath(allowed, handle)), 0)
        os.close(handle)
    kernel.syscall("landlock", _RESTRICT_SELF, rules, 0)
    os.close(rules)
