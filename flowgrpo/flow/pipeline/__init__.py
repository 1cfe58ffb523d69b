"""The policy: any unmodified diffusers flow pipeline, called for any slice of its schedule."""
