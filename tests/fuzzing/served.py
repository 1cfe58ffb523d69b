"""Serves three rewards twice, with and without a token, and prints both ports; run as a script, until it is killed."""

import threading

from fuzzing.requests import NAMES, TOKEN
from rewards.base import Reward
from rewards.served.guard import listen
from rewards.served.server import app, run

MOST = 4 << 20


def bright(images, prompts, **columns):
    return [0.25] * len(prompts) if isinstance(images, list) else images.double().flatten(1).mean(1)


def broken(images, prompts):
    raise RuntimeError("on purpose")


def stubborn(images, prompts):
    raise ValueError(f"refused on purpose: {prompts[0]}")


if __name__ == "__main__":
    made = [Reward(name, function) for name, function in zip(NAMES, (bright, broken, stubborn), strict=True)]
    threads = []
    for token in (None, TOKEN):
        listening = listen("127.0.0.1", 0, token)
        threads.append(threading.Thread(target=run, args=(app(made, token, max_bytes=MOST), listening)))
        threads[-1].start()
        print(listening.getsockname()[1], flush=True)
    for thread in threads:
        thread.join()
