"""Losses of texts, and the weights of tokens in them."""
