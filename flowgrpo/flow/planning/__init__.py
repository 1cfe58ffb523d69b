"""Forecasts before a run: its plan, model evaluations, memory, time and tree diagram."""
