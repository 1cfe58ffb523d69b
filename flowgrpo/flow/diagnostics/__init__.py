"""Diagnostics of a pipeline and a method: doctor, certificate, variance spectrum, and the explanation of one sample."""
