"""Forecasts before a run: the plan that users see, model evaluations, memory and the tree diagram."""
