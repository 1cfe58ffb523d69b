"""Requests to a reward server, right ones and such as are wrong in one to three places."""

import json
from dataclasses import dataclass

from hypothesis import strategies as st

from rewards.served.wire import CONTENT_TYPE

TOKEN = "secret"
NAMES = ("bright", "broken", "stubborn")


@dataclass(frozen=True)
class Case:
    """What is sent over one connection.

    Attributes:
        guarded: whether it goes to the server that asks for a token.
        answers: how many whole requests there are; 0 where that is not known.
        headless: whether answers have no body, as those to HEAD.
        name: of the reward that is asked, if any.
        rewards: what it gives if it accepts; None where that is not known.
    """

    guarded: bool
    pieces: tuple[bytes, ...]
    answers: int
    headless: bool
    name: str | None
    rewards: tuple[float, ...] | None

    def __repr__(self) -> str:
        sent = b"".join(self.pieces)
        return f"{len(self.pieces)} pieces, {len(sent)} bytes, guarded={self.guarded}: {sent[:400]!r}"


def often(right: object, *wrong: object) -> st.SearchStrategy:
    """Draw one value in most cases, and others in the rest."""
    return st.sampled_from((right,) * 5 * len(wrong) + wrong)


DEEP = st.sampled_from((10, 500, 900, 990, 3000, 100_000)).map(lambda n: "[" * n + "]" * n)
LONG = st.sampled_from((9, 999, 300_000))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=9)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner), max_leaves=5
)
ODD = st.one_of(
    VALUES.map(json.dumps),
    DEEP,
    LONG.map(lambda n: "1" + "0" * n),
    LONG.map(lambda n: '"' + "x" * n + '"'),
    LONG.map(lambda n: "[" + "0," * n + "0]"),
    st.sampled_from(("NaN", "-Infinity", '"\\ud800"', '"\\u0000"', "[", "{", "", "1e999", "[1e400]", "{\"a\":0,\"a\":[]}")),
)  # fmt: skip
SIZES = st.sampled_from((-1, 0, 1, 2, 3, 4, 255, 2**31, 2**63, 2**64, 10**400, 10**4299, 1.0, True, None, "2", "NaN"))
SHAPES = st.lists(SIZES, max_size=7).map(json.dumps) | ODD
DTYPES = st.sampled_from(("F16", "BF16", "F64", "I64", "BOOL", "f32", "F32 ", "")).map(json.dumps) | ODD
OFFSETS = st.lists(SIZES, max_size=3).map(json.dumps) | ODD
COLUMN_NAMES = st.sampled_from(("n", "images", "prompts", "self", "", "\ud800", "x" * 100_000)) | st.text(max_size=4)
COLUMNS = ODD | st.dictionaries(COLUMN_NAMES, st.lists(VALUES, max_size=3), max_size=3).map(json.dumps)
PROMPTS = ODD | st.lists(SCALARS, max_size=4).map(json.dumps) | LONG.map(lambda n: json.dumps(["a\n" * n] * 2))
SPOILT = (
    None, "dtype", "shape", "data_offsets", "prompts", "columns", "texts", "more", "header", "length", "bytes", "all",
)  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, tuple[float, ...] | None]:
    """Draw a body, and what the reward `bright` gives for it, None where it may not be a batch."""
    spoilt = draw(st.sampled_from(SPOILT))
    count, levels, side = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.sampled_from((1, 4, 64)))
    data = (b"\xff" if levels else b"\x00\x00\x00\x3f") * (count * 3 * side * side)
    card = {
        "dtype": json.dumps("U8" if levels else "F32"),
        "shape": json.dumps([count, 3, side, side]),
        "data_offsets": json.dumps([0, len(data)]),
    }
    metadata = {"prompts": json.dumps(["a"] * count), "columns": json.dumps({"n": [[0.5]] * count})}
    for name, odd in (("dtype", DTYPES), ("shape", SHAPES), ("data_offsets", OFFSETS)):
        if spoilt == name:
            card[name] = draw(odd)
    for name, odd in (("prompts", PROMPTS), ("columns", COLUMNS), ("texts", PROMPTS)):
        if spoilt == name:
            metadata[name] = draw(odd)
    parts = {"__metadata__": json.dumps(metadata), "samples": _object(card)}
    if spoilt == "texts" and draw(st.booleans()):
        del parts["samples"]
        data = b""
    if spoilt == "more":
        parts[draw(st.sampled_from(("samples2", "__metadata__", "samples", "")))] = draw(ODD)
    header = (draw(ODD) if spoilt == "header" else _object(parts)).encode(errors="surrogatepass")
    length = draw(st.sampled_from((0, 1, len(header) - 1, len(header) + 1, 2**40, 2**64 - 1)))
    written = (length if spoilt == "length" else len(header)).to_bytes(8, "little") + header + data
    if spoilt == "bytes":
        at, new = draw(st.integers(0, len(written))), draw(st.binary(max_size=8))
        written = written[:at] + new + written[at + draw(st.integers(0, 8)) :]
    if spoilt == "all":
        written = draw(st.binary(max_size=99) | LONG.map(bytes))
    return written, None if spoilt else ((1.0 if levels else 0.5),) * count


def _object(parts: dict[str, str]) -> str:
    """Return a JSON object of values that are JSON."""
    return "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in parts.items()) + "}"


METHODS = often("POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PATCH", "post", "BREW")
TARGETS = st.one_of(
    often("/bright", "/broken", "/stubborn"),
    st.sampled_from((
        "/health", "/metrics", "/", "//", "/brigt", "/bright/", "/bright/x", "/../bright", "/%2e%2e/health", "/%00",
        "/%ff", "/%zz", "/bright?x=%zz", "/bright#x", "http://127.0.0.1/health", "http://evil.example/health", "*",
        "bright", "/" + "a" * 5000, "/" + "%0a" * 999, "/bright%0d%0aX:%20y", "/..;/health", "/%F0%9F%98%80",
    )),
)  # fmt: skip
HOSTS = often(b"127.0.0.1", b"localhost:1", b"[::1]", b"evil.example", b"", b"[::1", b"127.0.0.1:x", b"\xff", b"[v1.a]",
              b"127.0.0.1, evil.example", b"localhost@evil.example", b"0x7f000001", b"127.1", b"x" * 9000)  # fmt: skip
RIGHT_TOKEN = f"Bearer {TOKEN}".encode()
TOKENS = often(RIGHT_TOKEN, None, b"Bearer wrong", b"Bearer ", b"\xff\xfe", TOKEN.encode(), b"x" * 9000)
KINDS = often(CONTENT_TYPE.encode(), None, b"text/plain", CONTENT_TYPE.encode() + b"; a=b", b"", b"\xff")
FURTHER = st.sampled_from((
    b"Expect: 100-continue", b"Connection: close", b"Connection: Upgrade\r\nUpgrade: websocket", b"X-A: \xff\xfe",
    b"Accept-Encoding: gzip", b"Cookie: " + b"y" * 9000, b"Connection: Upgrade\r\nUpgrade: h2c", b"X-A: b\r\n folded",
))  # fmt: skip
BROKEN = st.sampled_from((
    b"X-A: " + b"z" * 40_000, b"a: b\r\n" * 4000 + b"a: b", b"no colon", b"X-A : b", b"X-A: \x00", b": empty",
    b"Host: 127.0.0.1", b"Content-Length: 7\r\nContent-Length: 8", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", b"X-A: \r b",
))  # fmt: skip
LENGTHS = st.sampled_from((b"0", b"-1", b"+5", b"1e3", b"0x10", b"", b" ", b"7, 7", b"1" * 19, b"9" * 25, b"4194305",
                           "٣".encode(), b"1" * 5000, None))  # fmt: skip
CHUNKS = st.sampled_from((
    b"0\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n", b"3\r\nabcd\r\n", b"fffffffffffffffff\r\n", b"-1\r\n", b"g\r\n", b"",
    b"1;x=" + b"y" * 40_000, b"0\r\nX: y\r\n\r\n", b"1\r\na",
))  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> Case:
    """Draw one request with a wrong body or one other fault; it is whole unless its end is the fault."""
    how = draw(st.sampled_from(("body",) * 8 + ("line",) * 4 + ("head", "length", "short", "chunks", "cut")))
    guarded, (body, rewards), further = draw(st.booleans()), draw(bodies()), how not in ("body", "cut")
    method = draw(METHODS) if how == "line" else "POST"
    target = draw(TARGETS) if how == "line" else f"/{draw(often(*NAMES))}"
    version = draw(st.sampled_from((b"1.1", b"2.0", b"9", b"1.0"))) if how == "head" else b"1.1"
    lines = [b" ".join((method.encode(), target.encode("latin-1"), b"HTTP/" + version))]
    lines.append(b"Host: " + (draw(HOSTS) if further else b"127.0.0.1"))
    for name, values, right in (("Authorization", TOKENS, RIGHT_TOKEN), ("Content-Type", KINDS, CONTENT_TYPE.encode())):
        if (value := draw(values) if further else right) is not None:
            lines.append(f"{name}: ".encode() + value)
    length = str(len(body) + draw(st.sampled_from((1, -1, 4096)) if how == "short" else st.just(0))).encode()
    length = draw(LENGTHS) if how == "length" else None if how == "chunks" else length
    if length is not None:
        lines.append(b"Content-Length: " + length)
    if how == "chunks":
        lines.append(b"Transfer-Encoding: chunked")
        body = draw(CHUNKS)
    lines += draw(st.lists(FURTHER, max_size=2, unique=True))
    if how == "head":
        lines.insert(draw(st.integers(0, len(lines))), draw(BROKEN))
    end = draw(st.sampled_from((b"\r\n",) * 6 + (b"\n", b"\r", b"\r\r\n"))) if how == "head" else b"\r\n"
    sent = end.join([*lines, b"", b""]) + body
    if how == "cut":
        sent = sent[: draw(st.integers(0, len(sent) - 1))]
    name = target[1:] if method == "POST" and target[1:] in NAMES else None
    places = sorted(draw(st.lists(st.integers(0, min(len(sent), 600)), max_size=3)))
    pieces = tuple(sent[i:j] for i, j in zip([0, *places], [*places, len(sent)], strict=True) if i < j)
    return Case(guarded, pieces, int(how in ("body", "line")), method == "HEAD", name, rewards)


GOOD = f"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
PIPELINES = st.tuples(st.booleans(), st.integers(2, 40)).map(
    lambda drawn: Case(drawn[0], (GOOD * drawn[1],), drawn[1], False, None, None)
)
GARBAGE = st.tuples(st.booleans(), st.binary(max_size=200) | LONG.map(bytes)).map(
    lambda drawn: Case(drawn[0], (drawn[1],), 0, False, None, None)
)
CASES = st.one_of(requests(), requests(), requests(), requests(), requests(), requests(), PIPELINES, GARBAGE)
