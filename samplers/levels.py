"""The published noise level of each kernel, used by default."""

DEFAULT_LEVELS = {"ode": 0.0, "flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8, "ddim_sde": 0.8, "manifold": 0.5}
