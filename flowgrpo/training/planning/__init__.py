"""Forecasts of memory, traffic and time, from meta tensors and tables of GPUs."""
