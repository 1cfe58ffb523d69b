"""Rollouts of texts by an engine outside (`run.engine`): tokens and step maps are asked for, checked, and scored here."""
