"""Decoding: the masked-token predictor, and decoders that commit its proposals step by step."""
