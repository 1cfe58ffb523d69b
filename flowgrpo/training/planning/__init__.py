"""Forecasts of a run's memory, traffic and time, from meta tensors and data sheets of GPUs."""
