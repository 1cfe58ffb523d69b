"""Reward files that change the process when they are imported, made, moved and called: it stays as it was, scores are right.

A case is what is changed, and where.
"""

import os
import signal
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from hypothesis import strategies as st

from fuzzing.runner import Summary, run
from rewards import load

PICTURES = torch.linspace(0, 1, 96).reshape(2, 3, 4, 4)
TORCH = "import torch"
CHANGES = {  # what is imported and run, and what it changes
    "the working directory": ("import os", 'os.chdir("/")', os.getcwd),
    "torch's default dtype": (TORCH, "torch.set_default_dtype(torch.bfloat16)", torch.get_default_dtype),
    "torch's default device": (TORCH, 'torch.set_default_device("meta")', lambda: torch.zeros(1).device),
    "torch's gradient mode": (TORCH, "torch.set_grad_enabled(False)", torch.is_grad_enabled),
    "torch's deterministic algorithms": (
        TORCH,
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        torch.are_deterministic_algorithms_enabled,
    ),
    "cudnn.benchmark": (TORCH, "torch.backends.cudnn.benchmark = True", lambda: torch.backends.cudnn.benchmark),
    "cudnn.enabled": (TORCH, "torch.backends.cudnn.enabled = False", lambda: torch.backends.cudnn.enabled),
    "the precision of matmul": (
        TORCH,
        'torch.set_float32_matmul_precision("medium")',
        torch.get_float32_matmul_precision,
    ),
    "the attention flash": (
        TORCH,
        "torch.backends.cuda.enable_flash_sdp(False)",
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "the number of threads": (TORCH, "torch.set_num_threads(3)", torch.get_num_threads),
    "signal handlers": (
        "import signal",
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        lambda: signal.getsignal(signal.SIGUSR1),
    ),
    "the filters of warnings": ("import warnings", 'warnings.simplefilter("ignore")', lambda: list(warnings.filters)),
}
WHERE = ("import", "make", "move", "call", "yield", "number")
IN_CALLS = ("call", "yield", "number")
Case = Mapping[str, Sequence[str]]  # from where to names of `CHANGES`


def is_compared(name: str, where: str) -> bool:
    """Tell whether a change is put back there with a warning.

    In calls, the kinds of attention are left to the model, and there are no gradients.
    """
    return where not in IN_CALLS or not name.startswith(("the attention ", "torch's gradient"))


def source(case: Case) -> str:
    """Write a reward class that makes the changes of a case."""

    def lines(where: str, indent: int) -> str:
        return "".join(f"{' ' * indent}{CHANGES[name][1]}\n" for name in case.get(where, ())) or f"{' ' * indent}pass\n"

    imports = dict.fromkeys(CHANGES[name][0] for names in case.values() for name in names)
    return (
        "\n".join(imports)
        + f"\n{lines('import', 0)}class bright:\n    def __init__(self):\n{lines('make', 8)}"
        + f"    def to(self, device):\n{lines('move', 8)}"
        + f"    def __call__(self, images, prompts):\n{lines('call', 8)}        return self.each(images)\n"
        + f"    def each(self, images):\n{lines('yield', 8)}        yield from map(Number, images.float().mean((1, 2, 3)))\n"
        + "class Number:\n    def __init__(self, value):\n        self.value = value\n"
        + f"    def __float__(self):\n{lines('number', 8)}        return float(self.value)\n"
    )


def attempt(case: Case) -> None:
    """Use the reward; fail where something stays changed or a score differs."""
    before = {name: get() for name, (_, _, get) in CHANGES.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.py"
        file.write_text(source(case))
        reward = load(f"{file}:bright")
        reward.to("cpu")
        values = reward(PICTURES, ["a", "b"], {})
    for name, (_, _, get) in CHANGES.items():
        assert get() == before[name], name
    assert torch.allclose(values, PICTURES.mean((1, 2, 3)).double())


def fuzz(seed: int, count: int) -> Summary:
    names = st.lists(st.sampled_from(sorted(CHANGES)), max_size=3, unique=True)
    cases = st.dictionaries(st.sampled_from(WHERE), names, max_size=4).map(
        lambda case: {where: [name for name in own if is_compared(name, where)] for where, own in case.items()}
    )
    return run("plugins", cases, attempt, seed, count)
