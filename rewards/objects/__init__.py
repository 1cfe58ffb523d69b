"""Rewards that detect objects, their colours and places (GenEval), and written text."""
