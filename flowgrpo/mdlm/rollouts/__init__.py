"""Rollouts of texts: decode answers and record how they filled."""
