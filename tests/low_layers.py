"""Networks that have low-precision layers for good, to compare with those that have them for a while."""

from flowgrpo.training.weights.low_precision_layers import EightBitLinear
from flowgrpo.training.weights.quantisation import layers_in_blocks, quantise


def put_layers(network, word):
    """Replace the linear layers in a network's blocks by layers of a precision."""
    if word == "nf4":
        quantise(network, word)
        return
    for path, layer in layers_in_blocks(network, "").items():
        parent, _, name = path.rpartition(".")
        setattr(network.get_submodule(parent), name, EightBitLinear(layer, word))
