"""The network inside a decode: predictor, attention, key-value cache, mask token."""
