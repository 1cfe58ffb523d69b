"""Work of several processes: roles, collectives, messages, assignment of samples, minibatches, FSDP."""
