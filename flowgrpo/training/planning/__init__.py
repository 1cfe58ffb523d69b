"""Forecasts of memory, traffic and seconds, on meta tensors and from tables of GPUs."""
