"""What all rooms share: errors, batches, contracts, the definition of feedback, features, frames."""
