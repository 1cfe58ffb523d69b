"""Rewards of texts: answers, mathematics, programs."""
