"""Forecasts before a run of a language model: the plan, evaluations and memory."""
