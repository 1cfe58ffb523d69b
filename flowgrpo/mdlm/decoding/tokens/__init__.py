"""One decoding step: proposed tokens, blocks and logits in chunks."""
