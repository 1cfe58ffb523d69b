"""The public builder of decoders, which model cards import; see `flowgrpo.mdlm.decoding.decoders`."""

from flowgrpo.mdlm.decoding.decoders import build

__all__ = ["build"]
