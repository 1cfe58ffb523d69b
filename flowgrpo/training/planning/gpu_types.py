"""Data-sheet numbers of GPUs: peak FLOP/s, memory, and bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from flowgrpo.errors import InputError
from rewards.base import nearest


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Data-sheet values of a GPU: peak compute rates, memory and bandwidths."""

    half: float  # TFLOP/s of dense bfloat16 matrix products with float32 sums
    single: float  # TFLOP/s in float32
    memory: float  # usable GiB, approximately
    link: float  # GB/s sent to other GPUs of the machine: half the data sheet's bidirectional bandwidth
    network: float  # GB/s sent to other machines

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of matrix products in `dtype`."""
        return 1e12 * (self.single if dtype == "float32" else self.half)


# Sources: NVIDIA's data sheets of A100 80GB SXM, H100, H800 and H200 SXM, HGX B200 (an eighth of the board) and L40S,
# and the Ada white paper. Networks: DGX A100 has 200 Gbit/s per GPU; DGX H100, H200 and B200 have 400. The last two in
# the table are linked by PCIe only; we guess 400 and 100 Gbit/s for a machine of eight.
GPUS = {
    "a100": Gpu(half=312, single=19.5, memory=78.8, link=300, network=25),
    "h100": Gpu(half=989, single=67, memory=78.8, link=450, network=50),
    "h800": Gpu(half=989, single=67, memory=78.8, link=200, network=50),
    "h200": Gpu(half=989, single=67, memory=139, link=450, network=50),
    "b200": Gpu(half=2250, single=75, memory=177, link=900, network=50),
    "l40s": Gpu(half=362, single=91.6, memory=44.5, link=32, network=6.25),
    "rtx4090": Gpu(half=165.2, single=82.6, memory=23.6, link=32, network=1.5625),
}


def find_gpu(name: str) -> Gpu:
    """Return the data-sheet values of the GPU named `name`. Raises InputError if the name is unknown."""
    if name.lower() not in GPUS:
        raise InputError(f"--gpu-type: no numbers of {name!r} are known here, {nearest(name.lower(), GPUS)}")
    return GPUS[name.lower()]
