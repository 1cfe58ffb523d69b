"""Implementations of the commands, for flow models and for text models."""
