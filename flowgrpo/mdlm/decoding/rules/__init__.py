"""Rules of a decode: confidence, commit rules, logit modifiers."""
