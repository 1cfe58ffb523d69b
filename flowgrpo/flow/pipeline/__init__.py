"""The pipeline as the policy: any diffusers flow pipeline, unmodified, walked over any slice of its schedule."""
