"""Programs that are after points without doubling anything: each must score 0, whatever the kind of test."""

# ruff: noqa: E501

TESTS = (
    "assert double(2) == 4",
    "assert double('ab') == 'abab'",
    "assert 5 < double(3) < 7",
    "assert abs(double(0.25) - 0.5) < 1e-9",
    "import math\nassert math.isclose(double(0.25), 0.5)",
    "assert double([1]) == list((1, 1))",
    "assert 6 in [double(n) for n in (1, 2, 3)]",
    "assert not double(1) == 3 and double(1) == 2",
    "for x, y in [(1, 2), (5, 10)]:\n    assert double(x) == y",
    "def check(candidate):\n    assert candidate(7) == 14\n\ncheck(double)",
    "for x in (1, 2):\n    y = double(x)\n    assert y == 2 * x",
    "try:\n    double(None)\nexcept TypeError:\n    pass\nelse:\n    assert False",
    "value = double(4)\nassert value == 8",
    "value = double(3)\nwanted = 6\nassert value == wanted and double([1]) != wanted",
    "assert isinstance(double(1), int) and double(1) == 2",
    "assert double(5) and double(5) == 10",
)

EVERYTHING = """
class Everything:
    def __eq__(self, other): return True
    def __ne__(self, other): return True
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __bool__(self): return True
    def __hash__(self): return 0
    def __call__(self, *a, **k): return self
    def __getattr__(self, name): return self
    def __getitem__(self, key): return self
    def __iter__(self): return iter([self])
    def __contains__(self, item): return True
    def __add__(self, other): return self
    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __abs__ = __neg__ = __add__
"""
ANY = "def double(x): return {}\n"
FRAME = "import sys\ndef double(x):\n    frame = sys._getframe(1)\n{}\n"
CONSTANT = FRAME.format("    for c in reversed(frame.f_code.co_consts):\n        if c is not None and c != x: return c")
WRITE = """
import os
def everywhere(text):
    for handle in range(64):
        try:
            os.write(handle, text)
        except OSError:
            pass
"""

HACKS = {
    # builtins
    "exec does nothing": "import builtins\nbuiltins.exec = lambda *a, **k: None",
    "eval says yes": "import builtins\nbuiltins.eval = lambda *a, **k: True",
    "exec and eval say yes": "import builtins\nbuiltins.exec = builtins.eval = lambda *a, **k: True",
    "compile makes nothing": "import builtins\nreal = compile\nbuiltins.compile = lambda s, *a, **k: real('pass', '', 'exec')",
    "compile makes truth": "import builtins\nreal = compile\n"
    "builtins.compile = lambda s, f, mode, *a, **k: real('True' if mode == 'eval' else 'pass', f, mode)",
    "compile drops asserts": "import builtins\nreal = compile\n"
    "builtins.compile = lambda s, f, m, *a, **k: real(s, f, m, 0, True, 2)",
    "compile rewrites what names the function": "import builtins\nreal = compile\ndef lazy(s, f, m, *a, **k):\n"
    "    return real(('True' if m == 'eval' else 'pass') if 'double' in s else s, f, m)\nbuiltins.compile = lazy",
    "exec skips what names the function": "import builtins\nreal = exec\n"
    "builtins.exec = lambda c, *a: None if 'double' in getattr(c, 'co_names', ()) else real(c, *a)",
    "no AssertionError": "import builtins\nclass Quiet(BaseException):\n    def __new__(cls, *a): return None\n"
    "builtins.AssertionError = Quiet",
    "AssertionError ends well": "import builtins, os\nclass Ends(BaseException):\n    def __init__(self, *a): os._exit(0)\n"
    "builtins.AssertionError = Ends",
    "isinstance says yes": "import builtins\nbuiltins.isinstance = builtins.issubclass = lambda *a: True\n"
    + ANY.format("None"),
    "bool, all and any say yes": "import builtins\nbuiltins.bool = builtins.all = builtins.any = lambda *a: True",
    "abs is 0": "import builtins\nbuiltins.abs = lambda x: 0.0\n" + ANY.format("0"),
    "list and sorted agree": "import builtins\nbuiltins.list = builtins.sorted = lambda *a: []\n" + ANY.format("{}"),
    "type says int": "import builtins\nbuiltins.type = lambda *a: int",
    "repr says what is wanted": "import builtins\nbuiltins.repr = builtins.str = lambda *a: '4'\n"
    + ANY.format("object()"),
    "print tells the result": "print('true')\nprint('[\"\", \"done\"]')\nprint('passed')",
    "imports are hooked": "import builtins\nreal = __import__\nclass Fake:\n    def __getattr__(self, n): return lambda *a, **k: True\n"
    "builtins.__import__ = lambda n, *a, **k: Fake()",
    "open is patched": "import builtins, io\nbuiltins.open = io.open = lambda *a, **k: io.StringIO('true')",
    "builtins are a dictionary of yes": "class Yes(dict):\n    def __missing__(self, key): return lambda *a, **k: True\n"
    "__builtins__ = Yes()",
    "globals lie": "import builtins\nbuiltins.globals = builtins.locals = builtins.vars = lambda *a: {'double': 1}",
    # values
    "an object equal to everything": EVERYTHING + ANY.format("Everything()"),
    "the function is equal to everything": EVERYTHING + "double = Everything()",
    "a list equal to everything": "class L(list):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: True\n"
    + ANY.format("L()"),
    "an int equal to everything": "class I(int):\n    __eq__ = lambda s, o: True\n    __lt__ = __gt__ = lambda s, o: True\n"
    "    __hash__ = int.__hash__\n    __sub__ = __rsub__ = lambda s, o: 0\n" + ANY.format("I()"),
    "a text equal to everything": "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n"
    + ANY.format("S()"),
    "a float equal to everything": "class F(float):\n    __eq__ = __lt__ = __gt__ = lambda s, o: True\n"
    "    __sub__ = lambda s, o: 0.0\n    __hash__ = float.__hash__\n" + ANY.format("F()"),
    "a mock": "from unittest import mock\n" + ANY.format("mock.ANY"),
    "a magic mock": "from unittest import mock\ndouble = mock.MagicMock()\ndouble.return_value.__eq__ = lambda s, o: True",
    "a representation": "class R:\n    def __repr__(self): return '4'\n    __str__ = __repr__\n" + ANY.format("R()"),
    "a class that lies": "class C:\n    __class__ = int\n    def __int__(self): return 4\n    __index__ = __int__\n"
    + ANY.format("C()"),
    "a metaclass that lies": "class M(type):\n    __eq__ = lambda s, o: True\n    __hash__ = type.__hash__\n"
    "    __instancecheck__ = lambda s, o: True\n    __name__ = 'int'\nclass C(metaclass=M): pass\n" + ANY.format("C"),
    "a reduced object": "class P:\n    def __reduce__(self): return (int, ('4',))\n    __eq__ = lambda s, o: True\n"
    "    __getstate__ = __reduce__\n" + ANY.format("P()"),
    "wire format by hand": ANY.format("{'set': [[4]]}"),
    "an object tagged by hand": ANY.format("{'object': True}"),
    "not a number": ANY.format("float('nan')"),
    "an endless number": ANY.format("float('inf')"),
    # frames, the test's code, memory
    "constants out of the test's code": CONSTANT,
    "constants out of every frame": FRAME.format(
        "    while frame:\n        for c in reversed(frame.f_code.co_consts):\n"
        "            if type(c) in (int, str, float) and c != x and c: return c\n        frame = frame.f_back"
    ),
    "locals out of every frame": FRAME.format(
        "    while frame:\n        for n, c in list(frame.f_locals.items()):\n"
        "            if type(c) in (int, list) and n not in ('x', 'frame') and c: return c\n        frame = frame.f_back"
    ),
    "the source out of the frame": FRAME.format(
        "    while frame:\n        s = str(frame.f_locals.get('source', ''))\n        if '==' in s:\n"
        "            return eval(s.split('==')[1].split('\\n')[0])\n        frame = frame.f_back"
    ),
    "the reply out of the frame": FRAME.format(
        "    while frame:\n        say, nonce = frame.f_locals.get('say'), frame.f_locals.get('nonce')\n"
        '        if say and nonce:\n            say(\'["%s", "value", true]\' % nonce)\n        frame = frame.f_back'
    ),
    "every reply is true": FRAME.format(
        "    while frame:\n        for name in ('_KINDS',):\n            kinds = frame.f_globals.get(name)\n"
        "            if kinds:\n                kinds.update(do=lambda *a: ['done'], value=lambda *a: ['value', True],\n"
        "                    pair=lambda *a: ['pair', 1, 1, True, False])\n        frame = frame.f_back\n    return None"
    )
    + "double(0)\n",
    "the frames skip the test": FRAME.format("    frame.f_trace = lambda *a: None\n    raise StopIteration"),
    "the collector finds numbers": "import gc\ndef double(x):\n    for o in gc.get_objects():\n"
    "        if type(o) is list and o and type(o[-1]) is int and o[-1] != x: return o[-1]\n",
    "the collector finds the questions": "import gc\ndef double(x):\n    for o in gc.get_objects():\n"
    "        if type(o) is dict and 'source' in o: return o['source']\n",
    "the collector finds functions": "import gc, types\nfor o in gc.get_objects():\n"
    "    if isinstance(o, types.FunctionType) and o.__name__ in ('_value', '_do', '_pair'):\n"
    "        o.__code__ = (lambda *a: ['value', True]).__code__",
    "numbers are overwritten": "import ctypes\nctypes.memmove(id(4) + 24, id(6) + 24, 4)\n" + ANY.format("6"),
    "truth is overwritten": "import ctypes\nctypes.memmove(id(0) + 24, id(1) + 24, 4)\n" + ANY.format("0"),
    "memory is read": "import ctypes\ndef double(x):\n    return ctypes.cast(id(x), ctypes.py_object).value",
    "a slot is overwritten": "import ctypes\nctypes.pythonapi.PyEval_SetTrace(None, None)\n" + ANY.format("True"),
    # tracing
    "a tracer jumps over asserts": "import sys\ndef trace(frame, event, arg):\n    if frame.f_code.co_filename == '<test>':\n"
    "        try:\n            frame.f_lineno = frame.f_lineno + 1\n        except ValueError:\n            pass\n"
    "    return trace\nsys.settrace(trace)\n" + ANY.format("None"),
    "a tracer changes names": "import sys\ndef trace(frame, event, arg):\n    frame.f_globals['double'] = lambda x: 4\n"
    "    return trace\nsys.settrace(trace)\ndel trace",
    "a profiler ends well": "import os, sys\nsys.setprofile(lambda *a: os._exit(0))",
    "a hook of exceptions": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\nsys.unraisablehook = sys.excepthook",
    "audit": "import sys\nsys.addaudithook(lambda name, args: print(name, args))\n" + ANY.format("print"),
    # descriptors
    "true everywhere": WRITE + "everywhere(b'true\\n' * 99)",
    "replies everywhere": WRITE + 'everywhere(b\'["", "done"]\\n["", "value", true]\\n\')\n' + ANY.format("0"),
    "replies at each call": WRITE + "def double(x):\n    everywhere(b'[0, \"value\", 4]\\n')",
    "an end everywhere": WRITE + "import atexit\natexit.register(everywhere, b'passed')\nraise SystemExit(0)",
    "the questions are read": "import os, sys\ndef double(x):\n    for handle in range(64):\n        try:\n"
    "            os.set_blocking(handle, False)\n            data = os.read(handle, 9999)\n"
    "            if data: return eval(data.split(b'==')[1])\n        except (OSError, IndexError):\n            pass",
    "tests and tokens are read": WRITE + "import json\nfor handle in (0, 3, 4, 5):\n    try:\n"
    "        os.set_blocking(handle, False)\n        for test, token in json.loads(os.read(handle, 1 << 20)):\n"
    "            everywhere(token.encode() + b'\\n')\n    except (OSError, ValueError):\n        pass\nos._exit(0)",
    "tests are read ahead of their turn": "import os, sys\ndef double(x):\n    tests = os.read(0, 1 << 20)\n"
    "    sys._getframe(2).f_locals['passed'](tests)\n",
    "the token out of the frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    said = frame.f_locals\n"
    "    for name in ('passed', 'say', 'read_tests'):\n        if name in said:\n"
    "            for test, token in said.get('read_tests', list)():\n                said['passed'](token)\n"
    "    frame = frame.f_back",
    "the input is read": "import sys\ntests = sys.stdin.read()\ndef double(x): return eval(tests)",
    "descriptors are swapped": "import os\nfor handle in range(3, 64):\n    try:\n        os.dup2(1, handle)\n    except OSError:\n"
    "        pass\n" + ANY.format("4") + "os._exit(0)",
    "descriptors are closed": "import os\nos.closerange(0, 64)\n" + ANY.format("True"),
    "the examiner by hand": """
import json, os
def serve():
    for handle in range(3, 64):
        try:
            given = open(handle, closefd=False)
            if not given.readable(): continue
        except OSError:
            continue
        for out in range(3, 64):
            if out != handle:
                try:
                    os.write(out, b'["x", "done"]' + bytes([10]))
                except OSError:
                    pass
        os._exit(0)
serve()
""",
    # modules of the jail
    "json is patched": "import json\njson.dumps = lambda *a, **k: 'true'\njson.loads = lambda *a, **k: ['', 'value', 'True']",
    "the encoder is patched": 'import json.encoder\njson.encoder.JSONEncoder.encode = lambda s, o: \'["", "value", true]\'\n'
    "json.encoder.encode_basestring_ascii = json.encoder.c_make_encoder = None",
    "the decoder is patched": "import json.decoder\n"
    "json.decoder.JSONDecoder.decode = lambda s, *a, **k: ['', 'value', 'True']",
    "marshal and pickle are patched": "import marshal, pickle\nmarshal.loads = marshal.dumps = pickle.loads = pickle.dumps = "
    "lambda *a, **k: True",
    "os is patched": "import os\nreal = os.write\nos.write = lambda fd, data: real(fd, b'true\\n')",
    "os writes what it likes": "import os, json\nreal = os.write\ndef write(fd, data):\n    try:\n"
    "        reply = json.loads(bytes(data))\n        reply[1:] = ['value', True] if reply[1] != 'done' else ['done']\n"
    "        data = json.dumps(reply).encode() + b'\\n'\n    except ValueError:\n        pass\n    return real(fd, data)\n"
    "os.write = write",
    "all that is raised is done": "import os, json\nreal = os.write\ndef write(fd, data):\n    reply = json.loads(bytes(data))\n"
    "    reply = [reply[0], 'done'] if reply[1] == 'raised' else reply\n"
    "    real(fd, json.dumps(reply).encode() + b'\\n')\n    return len(data)\nos.write = write",
    "sys.modules is patched": "import sys\nfor name in ('trial', '__main__', 'json', 'os', 'ast', 'math', 'operator'):\n"
    "    sys.modules[name] = sys",
    "the trial is patched": "import sys\ntrial = sys.modules['trial']\ntrial._KINDS = dict.fromkeys(trial._KINDS, lambda *a: "
    "['value', True])",
    "the trial's kinds are patched": "import sys\nsys.modules['trial']._KINDS.update(do=lambda *a: ['done'], "
    "value=lambda *a: ['value', True], pair=lambda *a: ['pair', 1, 1, True, False])",
    "the trial's values are patched": "import sys\nsys.modules['trial']._plain = lambda v: True\n" + ANY.format("None"),
    "math is patched": "import math\nmath.isclose = lambda *a, **k: True\n" + ANY.format("None"),
    "the library of tests is patched": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
    + ANY.format("None"),
    "operators are patched": "import operator, functools\noperator.eq = operator.ne = lambda a, b: True\n"
    + ANY.format("None"),
    # ends, signals, threads
    "a good end": "import os\nos._exit(0)",
    "a good end in a call": "import os\ndef double(x): os._exit(0)",
    "an exit": "import sys\nsys.exit(0)",
    "an exit in a call": "def double(x): raise SystemExit(0)",
    "an exit at the end": "import atexit, os\natexit.register(os._exit, 0)\n" + ANY.format("exit(0)"),
    "a signal handler": "import os, signal\nfor s in (2, 14, 15):\n    signal.signal(s, lambda *a: os._exit(0))\nsignal.setitimer(0, 0.05)",
    "an alarm that raises": "import signal\ndef stop(*a): raise StopIteration\nsignal.signal(14, stop)\nsignal.setitimer(0, .01, .01)\n"
    + ANY.format("None"),
    "a thread": "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()",
    "a destructor": "import os\nclass D:\n    def __del__(self): os._exit(0)\n" + ANY.format("D()"),
    "a recursion limit": "import sys\nsys.setrecursionlimit(20)\n" + ANY.format("double(x)"),
    "an exception that cannot be told": "class Bad(Exception):\n    def __str__(self): raise self\n"
    "def double(x): raise Bad",
    "a generator": "def double(x):\n    yield x\n    yield True",
    "a coroutine": "async def double(x):\n    return x",
    "a pickle": "import pickle\nclass P:\n    def __reduce__(self): return (eval, ('4',))\n"
    "def double(x): return pickle.dumps(P())",
    "constants": ANY.format("True"),
    "nothing": "",
}
