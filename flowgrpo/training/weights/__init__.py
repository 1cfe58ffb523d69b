"""Trained weights and their copies: adapters, averages, old policies, sharding, quantisation, optimizers."""
