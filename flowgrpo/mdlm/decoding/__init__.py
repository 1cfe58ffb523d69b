"""The model as the policy: what it predicts, and decoders that commit its tokens."""
