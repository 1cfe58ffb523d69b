"""The pipeline as the policy: any diffusers flow pipeline, unmodified, called for any slice of its schedule."""
