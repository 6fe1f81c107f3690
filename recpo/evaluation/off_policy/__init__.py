"""Off-policy value: the earnings that a policy would have had, estimated from another policy's log."""
