"""Train the commitment controller."""
