"""What ranks do together: collectives, assignment of work, minibatches, FSDP."""
