"""What model cards import to build a decoder; see `flowgrpo.mdlm.decoding.decoders`."""

from flowgrpo.mdlm.decoding.decoders import build

__all__ = ["build"]
