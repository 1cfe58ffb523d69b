"""Rollouts of texts by an external engine (`run.engine`), which sends tokens and step maps; we check and score them."""
