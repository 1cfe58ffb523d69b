"""Rewards with a neural network, and their loading."""
