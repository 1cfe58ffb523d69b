"""The weights that learn and those beside them: adapters, averages, old policies, sharding, quantisation, optimizers."""
