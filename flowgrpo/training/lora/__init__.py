"""LoRA files: read, checked, and assigned to the layers of networks."""
