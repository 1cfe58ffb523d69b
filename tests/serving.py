"""A reward that is served in this process, and requests to it."""

import threading
from contextlib import contextmanager

import httpx2
import torch
import uvicorn
from safetensors.torch import save
from starlette.testclient import TestClient

from rewards import Reward
from rewards.served import guard
from rewards.served.server import app
from rewards.served.wire import encode


def bright(images, prompts):
    return images.mean((1, 2, 3))


def here(application):
    """Return a client of an application in this process."""
    return TestClient(application, base_url="http://127.0.0.1")


BODY = b"".join(encode(torch.rand(2, 3, 4, 4), ["a", "b"], {"n": [1, 2]}, "float32"))


def tensors(samples, prompts='["a", "b"]', columns="{}"):
    return save({"samples": samples}, {"prompts": prompts, "columns": columns})


@contextmanager
def serving(reward, **options):
    """Serve a function from a thread, and yield the address."""
    with guard.listen("127.0.0.1", 0, None) as listening:
        own = uvicorn.Server(guard.configure(app([Reward("bright", reward)], **options)))
        thread = threading.Thread(target=own.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            own.should_exit = True
            thread.join()


def health(address):
    answer = httpx2.get(f"http://127.0.0.1:{address[1]}/health", timeout=60, verify=False)
    return answer.status_code, answer.json()
