"""Off-policy value: what a policy would have earned, estimated from what another policy's log shows."""
