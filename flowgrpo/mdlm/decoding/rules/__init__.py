"""Which tokens a step commits: confidence, commit rules, logit modifiers."""
