"""Small HTTP servers in threads, for tests of what talks to one."""

import base64
import io
import json
import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


@contextmanager
def in_threads(handler, port=0):
    """Serve requests from threads. Yield the URL, and a function that ends the server at once."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def end():
        server.shutdown()
        server.server_close()

    try:
        yield f"http://127.0.0.1:{server.server_port}", end
    finally:
        end()


@contextmanager
def http_server(answer, port=0):
    """Serve `answer(asked) -> body or (status, body)`, a body being bytes or JSON's values; yield the server's URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {k.lower(): v for k, v in self.headers.items()}
            answered = answer(Asked(self.command, self.path, headers, body))
            status, said = answered if isinstance(answered, tuple) else (200, answered)
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # who asked has left
                self.close_connection = True

        do_GET = do_POST = _respond

        def log_message(self, *_):
            pass

    with in_threads(Handler, port) as (url, _):
        yield url


def endpoint(answer, models=("vlm",)):
    """Serve an OpenAI-compatible endpoint whose only choice is `answer(request)`: text, or (token, probability) pairs."""

    def respond(asked):
        if asked.path == "/v1/models":
            return {"object": "list", "data": [{"id": name} for name in models]}
        assert asked.path == "/v1/chat/completions"
        said = answer(asked.json)
        if not isinstance(said, list):
            return {"choices": [{"message": {"role": "assistant", "content": said}, "logprobs": None}]}
        top = [{"token": token, "logprob": math.log(p)} for token, p in said]
        logprobs = {"content": [{**top[0], "top_logprobs": top}]}
        return {"choices": [{"message": {"content": said[0][0]}, "logprobs": logprobs}]}

    return http_server(respond)


def words_of(request):
    return "\n".join(part["text"] for part in request["messages"][-1]["content"] if part["type"] == "text")


def pictures_of(request):
    urls = [part["image_url"]["url"] for part in request["messages"][-1]["content"] if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))) for url in urls]
