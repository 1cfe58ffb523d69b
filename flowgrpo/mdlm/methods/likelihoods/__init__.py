"""Estimates of an answer's log-likelihood from masked views."""
