"""Inputs of a pipeline call: prompt embeddings, latents, images, masks and strength."""
