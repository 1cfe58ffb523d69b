"""Seccomp: allow only the system calls that a Python program needs to compute.

The list has no calls for new processes, threads and programs, sockets, signals to others, shared memory, mounts, or changes
of owner or mode, and no calls that later kernels add. A refused call returns EPERM, which Python raises as PermissionError.
"""

import ctypes
import os

import kernel

# Numbers of x86_64 and of aarch64 (None: that machine has no such call), from the kernel's unistd.h.
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69),
    "pwritev": (296, 70), "sendfile": (40, 71), "copy_file_range": (326, 285), "fadvise64": (221, 223),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "membarrier": (324, 283),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "pause": (34, None),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "open": (2, None), "openat": (257, 56),
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "readlink": (89, None),
    "readlinkat": (267, 78), "statfs": (137, 43), "fstatfs": (138, 44), "getdents": (78, None),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None),
    "symlinkat": (266, 36), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47), "fsync": (74, 82),
    "fdatasync": (75, 83), "flock": (73, 32), "umask": (95, 166),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "close_range": (436, 436), "eventfd2": (290, 19), "poll": (7, None), "ppoll": (271, 73), "select": (23, None),
    "pselect6": (270, 72), "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95), "futex": (202, 98),
    "set_robust_list": (273, 99), "get_robust_list": (274, 100), "set_tid_address": (218, 96), "rseq": (334, 293),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "arch_prctl": (158, None), "getcpu": (309, 168),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "gettimeofday": (96, 169), "time": (201, None), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "getitimer": (36, 102), "setitimer": (38, 103),
    "alarm": (37, None), "times": (100, 153), "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160),
    "getrandom": (318, 278), "getpriority": (140, 141), "getrlimit": (97, 163),
}  # fmt: skip

# Calls that depend on an argument.
PRLIMIT, TGKILL, FCNTL, IOCTL = (302, 261), (234, 131), (72, 25), (16, 29)
_SETOWN_SETSIG_SETOWN_EX = (8, 10, 15)  # these would have the kernel signal another process
_TERMINAL_OR_FLAG = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, window size, FIONREAD, FIONBIO, (N)CLEX

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # of the classic Berkeley packet filter
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050001  # refused with EPERM
_NUMBER, _ARCHITECTURE = 0, 4  # byte offsets in the filter's input


def program(machine, own_pid):
    """Return the filter's instructions (code, jump if true, jump if false, operand); OSError on an unknown machine."""
    if machine not in _ARCHITECTURES:
        raise OSError(f"seccomp: no table of system calls for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for numbers in CALLS.values():
        if numbers[column] is not None:
            lines += _when(numbers[column], _ALLOW)
    lines += _on_argument(PRLIMIT[column], 0, [(0, _ALLOW)], _REFUSE)  # of this process
    lines += _on_argument(TGKILL[column], 0, [(own_pid, _ALLOW)], _REFUSE)
    lines += _on_argument(FCNTL[column], 1, [(command, _REFUSE) for command in _SETOWN_SETSIG_SETOWN_EX], _ALLOW)
    lines += _on_argument(IOCTL[column], 1, [(command, _ALLOW) for command in _TERMINAL_OR_FLAG], _REFUSE)
    return [*lines, (_RETURN, 0, 0, _REFUSE)]


def _when(value, action):
    return [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, action)]


def _on_argument(number, place, tests, otherwise):
    body = [(_LOAD, 0, 0, 16 + 8 * place)]  # low word of the argument: both machines are little-endian
    for test in tests:
        body += _when(*test)
    body.append((_RETURN, 0, 0, otherwise))
    return [(_EQUAL, 0, len(body), number), *body]


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("when_true", ctypes.c_uint8),
        ("when_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    ]


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("lines", ctypes.POINTER(_Instruction))]


def restrict():
    """Install the filter on this thread and its children for good; needs `give_up_privileges` before."""
    lines = program(kernel.MACHINE, os.getpid())
    array = (_Instruction * len(lines))(*lines)
    kernel.prctl(22, 2, ctypes.byref(_Filter(len(lines), array)))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
