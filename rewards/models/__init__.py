"""Rewards that hold a network, and what loads it."""
