"""Rollouts of texts: sampled and scored answers, and a record of how their canvases filled."""
